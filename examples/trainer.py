"""Train a small Llama with Transformers' `Trainer`: torchrun --nproc-per-node 2 examples/trainer.py --max_steps 50

Options are those of `transformers.TrainingArguments`.
"""

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from shardlite.integrations.transformers import ShardLiteTrainer
from shardlite.lab.train.text import read_corpus

parser = HfArgumentParser(TrainingArguments)
parser.set_defaults(output_dir="runs/trainer", use_cpu=not torch.cuda.is_available())
(args,) = parser.parse_args_into_dataclasses()
set_seed(args.seed)
text = torch.from_numpy(read_corpus(None, context=128, limit=1 << 18).train).long()
rows = [{"input_ids": row, "labels": row} for row in text.split(128) if len(row) == 128]
shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
trainer = ShardLiteTrainer(model=model, args=args, train_dataset=rows, sharding={"stage": 3})
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()  # a folder for `LlamaForCausalLM.from_pretrained`; every rank must call it
