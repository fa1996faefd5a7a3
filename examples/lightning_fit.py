"""An ordinary `LightningModule`, trained with ShardLite.

    torchrun --nproc-per-node 2 examples/lightning_fit.py --epochs 3
    torchrun --nproc-per-node 2 examples/lightning_fit.py --epochs 6 --resume runs/lightning/last.ckpt

Only the strategy is specific to sharding. The second command may use another number of ranks and another stage.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from shardlite import AdamW
from shardlite.apps.demo.gpt import GPT, GPTConfig
from shardlite.apps.demo.text import Bytes, draw_batch, read_corpus
from shardlite.integrations.lightning import ShardLiteStrategy

CONFIG = GPTConfig(layers=2, width=64, heads=2, context=64)
BATCH = 8


class Writer(LightningModule):
    """A byte-level GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(CONFIG)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss."""
        return self.gpt(*batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the loss, averaged over the ranks."""
        self.log("validation", self.gpt(*batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return an optimizer and a warm-up. Any elementwise optimizer works."""
        optimizer = AdamW(self.parameters(), lr=2e-3)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def windows(text: Bytes, count: int) -> list[tuple[Tensor, ...]]:
    """Return random windows of a text."""
    drawn = (draw_batch(text, shape=(1, CONFIG.context), key=(i,)) for i in range(count))
    return [(x[0], y[0]) for x, y in drawn]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="total number of epochs, also with --resume")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"), help="folder for the checkpoint")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    options = parser.parse_args()
    seed_everything(0)
    text = read_corpus(None, context=CONFIG.context, limit=1 << 20)
    trainer = Trainer(
        strategy=ShardLiteStrategy(stage=options.stage),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    train = DataLoader(windows(text.train, 640), BATCH, shuffle=True)  # Lightning gives each rank its part
    trainer.fit(Writer(), train, DataLoader(windows(text.validation, 64), BATCH), ckpt_path=options.resume)
    trainer.save_checkpoint(options.out / "last.ckpt")  # every rank calls this method, rank 0 writes
    if trainer.is_global_zero:
        print(f"validation {trainer.callback_metrics['validation']:.4f}, saved in {options.out}", flush=True)
    dist.destroy_process_group()
