"""`shardlite verify` on the command line: `verify` on a GPT and random bytes."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardlite.apps import launch
from shardlite.apps.demo.command import add_gpt, settings_of
from shardlite.apps.demo.settings import Settings
from shardlite.apps.options import add_precision, precision_of, started_ranks, usage_errors

if TYPE_CHECKING:
    from shardlite.config import Precision


def add_verify(commands: Any) -> None:
    """Add `shardlite verify` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "verify",
        help="train a small GPT sharded and in every other way, and compare the numbers",
        description="Train a byte-level GPT on random bytes: sharded at each stage, by data parallelism in a simple way"
        " and in PyTorch's, and in one process. Prints the largest differences and names the first tensor beyond its"
        " bound; the exit status is 1 then. Starts the ranks itself, or is started by torchrun.",
    )
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments))
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, metavar="N", help="processes (2)")
    for name, kind, metavar, default, meaning in (
        ("steps", int, "N", 4, "optimizer steps"),
        ("batch", int, "N", Settings.batch, "sequences per rank"),
        ("lr", float, "RATE", Settings.lr, "learning rate"),
        ("seed", int, "N", Settings.seed, "decides the first weights and the batches"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{meaning} ({default})")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="train on fewer ranks, too, with order='tree': equal bits (powers of two)",
    )
    add_precision(group)
    add_gpt(parser, size="tiny")


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options, then start the ranks, or run as one of them."""
    started = started_ranks(parser, options)
    with usage_errors(parser):
        settings, precision = settings_of(options), precision_of(options)
    if started is None:
        return launch.launch(options.ranks or 2, arguments)
    return _verify_gpt(settings, precision, elastic=options.elastic)


def _verify_gpt(settings: Settings, precision: "Precision", *, elastic: bool) -> int:
    """Compare on random bytes, as one of the ranks."""
    import torch
    import torch.distributed as dist

    from shardlite.apps.demo.gpt import BYTE_VALUES, GPT
    from shardlite.apps.verify.verify import verify

    def batch(_step: int, _rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(BYTE_VALUES, (settings.batch, settings.gpt.context + 1))
        return text[:, :-1], text[:, 1:]

    dist.init_process_group("gloo")
    try:
        report = verify(
            lambda: GPT(settings.gpt),
            batch,
            settings.steps,
            lr=settings.lr,
            precision=precision,
            seed=settings.seed,
            elastic=elastic,
        )
        if dist.get_rank() == 0:
            print(report.table(), flush=True)
        dist.barrier()  # torchrun ends all ranks when one fails: wait until the table is printed
    finally:
        dist.destroy_process_group()
    return 0 if report.ok else 1
