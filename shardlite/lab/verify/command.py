"""`shardlite verify` on the command line: `verify` on a GPT and random bytes."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardlite.cli import launch, precision_of, started_ranks, usage_errors
from shardlite.lab.train.command import settings_of

if TYPE_CHECKING:
    import torch


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options. Then start the ranks, or verify as a started rank. Return 1 if a tensor exceeds its bound."""
    started = started_ranks(parser, options)
    with usage_errors(parser):
        settings = settings_of(options)
        precision = precision_of(options.compute, settings.reduce, settings.master)
    if started is None:
        return launch.launch(options.ranks or 2, arguments)

    import torch
    import torch.distributed as dist

    from shardlite.lab.compared.gpt import BYTE_VALUES, GPT
    from shardlite.lab.verify.verify import verify

    def batch(_step: int, _rank: int) -> "tuple[torch.Tensor, torch.Tensor]":
        text = torch.randint(BYTE_VALUES, (settings.batch, settings.gpt.context + 1))
        return text[:, :-1], text[:, 1:]

    chosen = {"lr": settings.lr, "precision": precision, "seed": settings.seed, "elastic": options.elastic}
    dist.init_process_group("gloo")
    try:
        report = verify(lambda: GPT(settings.gpt), batch, settings.steps, **chosen)
        if dist.get_rank() == 0:
            print(report.table(), flush=True)
        dist.barrier()  # wait for the table, because torchrun ends all ranks when one rank fails
    finally:
        dist.destroy_process_group()
    return 0 if report.ok else 1
