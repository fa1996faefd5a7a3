"""`shardlite memory` on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from shardlite.cli import check_file, check_folder, check_numbers, usage_errors, world_size
from shardlite.lab.memory import OWN
from shardlite.lab.plan.presets import check_model

SYSTEMS = (
    *("activations", "activations, bf16", "plain", "ddp", "zero", "fsdp1", "fsdp2"),
    *("deepspeed1", "deepspeed2", "deepspeed3", "stage0", "stage1", "stage2", "stage3"),
    *("in_backward", "bf16", "bf16, split24", "bf16, int8", "compact", "in_backward, prefetch 0"),
)
"""The names of `lab.compared.systems.MEASURED`, repeated here because that module imports PyTorch."""


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Measure all systems, and return 1 if a system failed. A rank that `run_all` has started measures one system."""
    if options.row is not None and world_size() is not None:  # a started rank, whose parent has checked the options
        from shardlite.lab.memory.run import run_rank

        return run_rank(options)
    with usage_errors(parser, "--plots" if options.timeline is None else "--timeline"):
        _check(options)
        from shardlite.lab.memory.run import run_all

        return run_all(options, arguments)
    raise AssertionError("usage errors exit")


def _check(options: Namespace) -> None:
    """Check the options as far as this is possible without PyTorch.

    Raises:
        ValueError: an option has an invalid value.
        OSError: the path of an output cannot be written.
    """
    if world_size() is not None:
        raise ValueError("memory starts its ranks itself; run it without torchrun")
    if options.process and not Path("/proc/self/smaps_rollup").exists():
        raise ValueError("--process reads /proc/PID/smaps_rollup, which is not available; requires Linux")
    check_numbers(options, batch=1, context=1, steps=1, prefetch=0)
    check_model(options.model)
    if min(options.ranks) < 1:
        raise ValueError(f"--ranks must be at least 1, got {min(options.ranks)}")
    if options.timeline is not None and len(options.ranks) > 1:
        raise ValueError(f"--timeline takes one number of --ranks, got {len(options.ranks)}")
    check_file("--json", options.json)
    check_file("--timeline", options.timeline)
    check_folder("--plots", options.plots)
    known = (*SYSTEMS, OWN)
    for system in options.systems:
        if system not in known and options.systems != ["all"]:
            raise ValueError(f"--systems {system!r} is not one of {', '.join(map(repr, known))}, or `all`")
