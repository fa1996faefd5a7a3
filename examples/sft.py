"""Supervised fine-tuning with TRL's `SFTTrainer`.

torchrun --nproc-per-node 2 examples/sft.py
"""

import torch
from datasets import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from shardlite.integrations.transformers import ShardLiteMixin
from shardlite.lab.train.text import read_corpus


class ShardedSFTTrainer(ShardLiteMixin, SFTTrainer):
    """`SFTTrainer` with a sharded model."""


set_seed(0)
text = read_corpus(None, context=64, limit=1 << 16).train.tobytes().decode(errors="replace")
rows = Dataset.from_dict({"text": [text[start : start + 64] for start in range(0, len(text), 64)]})
tokenizer = ByT5Tokenizer()  # a token is a byte, so it needs no files
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
args = SFTConfig("runs/sft", max_steps=50, learning_rate=1e-3, report_to="none", use_cpu=not torch.cuda.is_available())
trainer = ShardedSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, sharding={"stage": 3})
trainer.train()
trainer.save_model()  # a folder for `LlamaForCausalLM.from_pretrained`; every rank calls this method
