"""A training loop with Accelerate, in which `install()` lets `prepare` shard the model.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from shardlite.integrations.accelerate import install
from shardlite.lab.compared.gpt import GPT, GPTConfig
from shardlite.lab.train.text import draw_batch, read_corpus

install(stage=3)  # the only line that differs from a program with DistributedDataParallel
accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = GPT(GPTConfig(layers=2, width=64, heads=2, context=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
text = read_corpus(None, context=64, limit=1 << 20)
loader = DataLoader(TensorDataset(*draw_batch(text.train, shape=(640, 64), key=(0,))), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        loss = model(x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}  loss {accelerator.reduce(loss.detach(), 'mean'):.4f}", flush=True)
accelerator.save_state("runs/accelerate/state")
accelerator.save_model(model, "runs/accelerate/model")
accelerator.end_training()
