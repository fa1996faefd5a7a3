"""Training with Lightning's `Trainer`, whose strategy shards the model.

torchrun --nproc-per-node 2 examples/lightning_fit.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import shardlite.integrations.lightning  # noqa: F401 - registers the strategy
from shardlite.lab.compared.gpt import GPT, GPTConfig
from shardlite.lab.train.text import draw_batch, read_corpus


class Writer(LightningModule):
    """A byte-level GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=2, width=64, heads=2, context=64))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        loss = self.gpt(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


seed_everything(0)
text = read_corpus(None, context=64, limit=1 << 20)
data = TensorDataset(*draw_batch(text.train, shape=(640, 64), key=(0,)))
trainer = Trainer(strategy="shardlite", devices=2, max_epochs=3, default_root_dir="runs/lightning")
trainer.fit(Writer(), DataLoader(data, batch_size=8))
trainer.save_checkpoint("runs/lightning/last.ckpt")  # every rank calls this method, rank 0 writes
