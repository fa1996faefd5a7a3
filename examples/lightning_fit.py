"""An ordinary `LightningModule`, trained with ShardLite.

    torchrun --nproc-per-node 2 examples/lightning_fit.py --epochs 3
    torchrun --nproc-per-node 2 examples/lightning_fit.py --epochs 6 --resume runs/lightning/last.ckpt

The script passes the strategy to the `Trainer`. No other line is specific to sharding. The second command may use
another number of ranks and another stage.
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
from torch.utils.data import DataLoader, Dataset

from shardlite import AdamW
from shardlite.apps.demo.gpt import GPT, GPTConfig
from shardlite.apps.demo.text import Bytes, draw_batch, read_corpus
from shardlite.integrations.lightning import ShardLiteStrategy

CONFIG = GPTConfig(layers=2, width=64, heads=2, context=64)
BATCH, ACCUMULATE = 8, 2


class Writer(LightningModule):
    """A byte-level GPT without code for sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(CONFIG)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss."""
        return self.gpt(*batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the loss, averaged over the ranks."""
        self.log("validation", self.gpt(*batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an optimizer and a warm-up over ten steps. Any elementwise optimizer works."""
        optimizer = AdamW(self.parameters(), lr=2e-3)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Windows(Dataset[tuple[Tensor, ...]]):
    """Random windows of a text."""

    def __init__(self, text: Bytes, count: int) -> None:
        self._text, self._count = text, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        x, y = draw_batch(self._text, shape=(1, CONFIG.context), key=(i,))
        return x[0], y[0]


def main() -> None:
    """Train the model. Every rank calls this function."""
    options = parse()
    seed_everything(options.seed)
    text = read_corpus(None, context=CONFIG.context, limit=1 << 20)
    trainer = Trainer(
        strategy=ShardLiteStrategy(stage=options.stage),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=options.epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    train = DataLoader(Windows(text.train, 640), BATCH, shuffle=True)  # Lightning gives each rank its part
    validation = DataLoader(Windows(text.validation, 64), BATCH)
    trainer.fit(Writer(), train, validation, ckpt_path=options.resume)
    trainer.save_checkpoint(options.out / "last.ckpt")  # every rank calls this method, rank 0 writes
    if trainer.is_global_zero:
        print(f"validation {trainer.callback_metrics['validation']:.4f}, saved in {options.out}", flush=True)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="total number of epochs, also with --resume; an epoch has 20 steps on 2 ranks",
    )
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"), help="folder for the checkpoint")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
