"""A training loop with Accelerate, in which ShardLite replaces Accelerate's model wrapper.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --epochs 3

Accelerate initializes the process group and splits the data. Pass loaders and optimizer to `prepare`, but not the
model. Set mixed precision with `ShardLite(..., precision=...)`.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from shardlite import AdamW, ShardLite
from shardlite.apps.demo.gpt import GPT, GPTConfig
from shardlite.apps.demo.text import Bytes, draw_batch, read_corpus

CONFIG = GPTConfig(layers=2, width=64, heads=2, context=64)
BATCH, ACCUMULATE = 8, 2


def main() -> None:
    """Train the model. Every rank calls this function."""
    options = parse()
    set_seed(options.seed)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE)
    text = read_corpus(None, context=CONFIG.context, limit=1 << 20)

    model = ShardLite(GPT(CONFIG), stage=options.stage, device=accelerator.device)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(windows(text.train, 640), BATCH)
    validation = DataLoader(windows(text.validation, 64), BATCH)
    train, validation, optimizer = accelerator.prepare(train, validation, optimizer)

    for epoch in range(options.epochs):
        for x, y in train:
            with accelerator.accumulate(model):  # calls no_sync() of the model
                loss = model(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)  # uses the norm over all ranks
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}  validation {validate(accelerator, model, validation):.4f}", flush=True)

    weights = model.full_state_dict(rank=0)  # instead of get_state_dict or save_model, on every rank
    if accelerator.is_main_process:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(weights, options.out / "model.pt")
    accelerator.end_training()


@torch.no_grad()
def validate(accelerator: Accelerator, model: ShardLite, batches: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the mean loss over all ranks. Every rank must call this function, because each forward gathers weights."""
    model.eval()
    losses = torch.stack([model(x, y) for x, y in batches])
    model.train()
    return accelerator.gather(losses).mean().item()


def windows(text: Bytes, count: int) -> TensorDataset:
    """Return random windows of a text, with the next byte of each position as target."""
    return TensorDataset(*draw_batch(text, shape=(count, CONFIG.context), key=(0,)))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="epochs, each of 20 steps on 2 ranks (%(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"), help="folder for the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
