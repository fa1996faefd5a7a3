"""A template for long runs: any number of ranks and hosts, gradient accumulation, a scaled learning rate, restarts.

    torchrun --nproc-per-node 2 examples/torchrun_template.py --out runs/template
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # gives each restart a new store
    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_template.py --out runs/template

Copy this file, and replace `GPT` and `Windows` with your model and your data. `docs/launch.md` explains how to start it
on several hosts, with Slurm and with Kubernetes.

The run counts samples, not steps, and a checkpoint stores the number of samples read so far. So if a run resumes with
a different number of ranks, it still reads each sample exactly once.

    samples   0 .. 15   16 .. 31   32 .. 39   40 .. 47      4 ranks x 4 sequences take two steps,
    ranks     4         4          2          2             then 2 ranks continue
"""

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardlite import AdamW, ShardLite, load, save
from shardlite.checkpoint import latest
from shardlite.lab.compared.gpt import GPT, GPTConfig
from shardlite.lab.train.text import Bytes, read_corpus

CONFIG = GPTConfig(layers=4, width=128, heads=4, context=64)
BASE_BATCH = 16
"""Number of samples per step for which the learning rate is `--lr`."""


def main() -> None:
    """Train until `--samples` samples are read, or SIGTERM requests the end."""
    options = parse()
    with notice_of_the_end() as asked, joined() as place:
        torch.manual_seed(options.seed)
        model = ShardLite(GPT(CONFIG), device=place.device)
        optimizer = AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
        windows = Windows(read_corpus(None, context=CONFIG.context, limit=1 << 20).train, options.seed, place.device)
        position = load(options.out, model, optimizer)["samples"] if latest(options.out) else 0
        train(Run(model, optimizer, windows, place, options), position, asked)


@dataclass(frozen=True)
class Place:
    """Rank and device of this process."""

    rank: int
    world_size: int
    device: torch.device


@contextmanager
def joined() -> Iterator[Place]:
    """Initialize the process group from the environment that `torchrun` sets, and destroy it on exit."""
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Place(rank, world_size, device)
    finally:
        dist.destroy_process_group()


class Windows:
    """An endless sequence of samples: the windows of a text, in a new random order in each epoch."""

    def __init__(self, text: Bytes, seed: int, device: torch.device) -> None:
        self._text, self._seed, self._device = text, seed, device
        self._count = (len(text) - 1) // CONFIG.context
        self._epoch, self._order = -1, np.empty(0)

    def __getitem__(self, number: int) -> Bytes:
        epoch, place = divmod(number, self._count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._count)
        start = int(self._order[place]) * CONFIG.context
        return self._text[start : start + CONFIG.context + 1]

    def batch(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these samples."""
        tokens = torch.from_numpy(np.stack([self[number] for number in numbers]).astype(np.int64)).to(self._device)
        return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Run:
    """The objects that all steps of a run share."""

    model: ShardLite
    optimizer: AdamW
    windows: Windows
    place: Place
    options: argparse.Namespace


def shares(position: int, place: Place, batch: int, accumulate: int) -> list[range]:
    """Return this rank's samples of the step that begins at sample `position`, one range per forward."""
    forward = place.world_size * batch
    starts = [position + micro * forward + place.rank * batch for micro in range(accumulate)]
    return [range(start, start + batch) for start in starts]


def train(run: Run, position: int, asked: Event) -> None:
    """Take steps from sample `position` on until all samples are read. Save every few steps, and before the end."""
    options, place = run.options, run.place
    taken = place.world_size * options.batch * options.accumulate
    if place.rank == 0:
        print(f"{place.world_size} ranks resume at sample {position} of {options.samples}, {taken} a step", flush=True)
    step, ends = 0, False
    while position < options.samples and not ends:
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(position, taken, options)
        loss = take_step(run, shares(position, place, options.batch, options.accumulate))
        if place.rank == 0:
            print(f"samples {position} to {position + taken - 1}  loss {loss:.4f}", flush=True)
        step, position, ends = step + 1, position + taken, asked_on_any_rank(asked)
        if ends or step % options.every == 0 or position >= options.samples:
            save(options.out, run.model, run.optimizer, {"samples": position}, step=position, keep=2)


def learning_rate(position: int, taken: int, options: argparse.Namespace) -> float:
    """Return the learning rate of a step: proportional to its samples (Goyal et al., 2017), with a linear warm-up."""
    return options.lr * taken / BASE_BATCH * min(1.0, (position + taken) / options.warmup)


def take_step(run: Run, parts: list[range]) -> float:
    """Take one step on this rank's samples; return the mean loss of all ranks."""
    total = torch.zeros(())
    for part in parts:
        x, y = run.windows.batch(part)
        with nullcontext() if part is parts[-1] else run.model.no_sync():  # only the last backward reduces
            loss = run.model(x, y) / len(parts)
            loss.backward()
        total += loss.detach().cpu()
    run.model.clip_grad_norm_(1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@contextmanager
def notice_of_the_end() -> Iterator[Event]:
    """Yield an event that is set on SIGTERM, which schedulers send before they end a job."""
    asked = Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def asked_on_any_rank(asked: Event) -> bool:
    """Return whether any rank got SIGTERM. All ranks must end after the same step."""
    count = torch.tensor(int(asked.is_set()))
    dist.all_reduce(count)
    return bool(count)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1600, help="samples in the whole run (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and forward (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of a step of 16 samples (%(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=160, help="samples in the warm-up of the learning rate (%(default)s)"
    )
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/template"), help="folder of the checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
