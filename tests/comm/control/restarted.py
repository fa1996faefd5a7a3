"""A program that `torchrun --max-restarts` starts again: it goes on from its newest checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 1 restarted.py FOLDER TRANSPORT FATAL

In attempt 0 rank 1 is killed at step FATAL; -1 for never. The last attempt writes its number to FOLDER/attempt.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardlite import AdamW, Route, ShardLite, load, save
from shardlite.checkpoint import latest

STEPS = 5


def main(folder: Path, transport: str, fatal: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = ShardLite(net, route=Route(transport=transport), timeout=timedelta(seconds=60))
    optimizer = AdamW(model.parameters(), lr=0.1)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    begin = load(folder / "run", model, optimizer)["step"] if latest(folder / "run") else 0
    for step in range(begin, STEPS):
        if step == fatal and rank == 1 and attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(folder / "run", model, optimizer, {"step": step + 1}, step=step + 1, keep=2)
    if rank == 0:
        torch.save(model.full_state_dict(rank=0), folder / "final.pt")
        (folder / "attempt").write_text(attempt)
    else:
        model.full_state_dict(rank=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
