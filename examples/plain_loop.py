"""A complete training script: initialize the process group, wrap, train, validate, save, and resume.

    torchrun --nproc-per-node 2 examples/plain_loop.py --steps 100
    torchrun --nproc-per-node 2 examples/plain_loop.py --steps 200 --resume runs/plain

The model and the loop are ordinary PyTorch. Comments mark the lines that differ because of sharding.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from shardlite import AdamW, ShardLite, load, save
from shardlite.lab.compared.gpt import GPT, GPTConfig
from shardlite.lab.train.text import Bytes, draw_batch, read_corpus

CONFIG = GPTConfig(layers=4, width=128, heads=4, context=64)
BATCH, ACCUMULATE = 8, 2
WARMUP, MAX_NORM = 10, 1.0


def main() -> None:
    """Train the model. Every rank calls this function."""
    options = parse()
    device = join_ranks()
    text = read_corpus(None, context=CONFIG.context, limit=1 << 20)

    torch.manual_seed(options.seed)
    model = ShardLite(GPT(CONFIG), stage=options.stage, device=device)  # all ranks start from rank 0's weights
    decayed = [p for p in model.parameters() if p.ndim >= 2]  # a shard has the `ndim` of its parameter
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, 1 - step / (options.steps + 1)))
    if options.resume:
        load(
            options.resume, model, optimizer, {"schedule": schedule}
        )  # ranks and stage may differ from the saved run's

    for step in range(schedule.last_epoch, options.steps):
        train_loss = take_step(model, optimizer, text.train, device, key=(options.seed, step))
        schedule.step()
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            loss = validate(model, text.validation, device)
            save(options.out, model, optimizer, {"schedule": schedule}, step=step + 1)  # each rank writes its part
            if dist.get_rank() == 0:
                print(f"step {step + 1}  loss {train_loss:.4f}  validation {loss:.4f}", flush=True)
    dist.destroy_process_group()


def join_ranks() -> torch.device:
    """Initialize the process group, with NCCL on GPUs, and return the device of this rank."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def take_step(model: ShardLite, optimizer: AdamW, text: Bytes, device: torch.device, key: tuple[int, int]) -> float:
    """Take one step on this rank's batches, and return the mean loss of all ranks."""
    total = torch.zeros((), device=device)
    for micro in range(ACCUMULATE):
        x, y = draw_batch(text, shape=(BATCH, CONFIG.context), key=(*key, dist.get_rank(), micro))
        is_last = micro == ACCUMULATE - 1
        with nullcontext() if is_last else model.no_sync():  # only the last backward reduces gradients
            loss = model(x.to(device), y.to(device)) / ACCUMULATE
            loss.backward()
        total += loss.detach()
    model.clip_grad_norm_(MAX_NORM)  # uses the norm over all ranks
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(total)


@torch.no_grad()
def validate(model: ShardLite, text: Bytes, device: torch.device, batches: int = 4) -> float:
    """Return the mean loss over validation text. All ranks must call this function, because forwards gather weights."""
    model.eval()
    total = torch.zeros((), device=device)
    for i in range(batches):
        x, y = draw_batch(text, shape=(BATCH, CONFIG.context), key=(i, dist.get_rank()))
        total += model(x.to(device), y.to(device)) / batches
    model.train()
    return mean_over_ranks(total)


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of `value`, [], over all ranks, on every rank."""
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--every", type=int, default=50, help="steps between two validations, each followed by a checkpoint"
    )
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/plain"), help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="folder of the run to resume, or of one of its checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
