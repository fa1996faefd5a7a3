"""What commands share: options, their checks, and how wrong usage ends a command."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.apps.launch import world_size

if TYPE_CHECKING:
    import torch

    from shardlite.config import Precision

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values of options that choose a dtype, and the dtype's name in PyTorch."""

# Repeated here, because the modules that define them import PyTorch. A test compares both.
STATES = ("fp32", "bf16", "int8")
ALGORITHMS = ("ring", "bidirectional", "direct", "hierarchical", "halving")
MOST_RANKS = 4096  # of a plan


def add_model(parser: ArgumentParser, *, example: str, batch: int) -> None:
    """Add the options of `plan.source.find_source`, with a preset as an example and a default for `--batch`."""
    group = parser.add_argument_group("model")
    meaning = f"a preset ({example}), a Hugging Face config file, or module:name"
    group.add_argument("--model", required=True, metavar="MODEL", help=meaning)
    group.add_argument("--batch", type=int, default=batch, metavar="N", help=f"sequences per rank ({batch})")
    group.add_argument("--context", type=int, metavar="N", help="tokens per sequence (the model's own)")
    group.add_argument("--inputs", metavar="MODULE:NAME", help="function that returns a batch, for other inputs")


def add_training(group: Any) -> None:
    """Add the options that are arguments of `ShardLite`, `Precision` and `AdamW`."""
    group.add_argument("--state", choices=STATES, default="fp32", help="format of the moments (fp32)")
    group.add_argument("--in-backward", action="store_true", help="step shards in the backward")
    add_precision(group)
    group.add_argument("--master", choices=("fp32", "split24"), default="fp32", help="format of the weights (fp32)")
    group.add_argument("--prefetch", type=int, default=1, metavar="N", help="units to gather ahead (1)")


def add_precision(group: Any) -> None:
    """Add the dtypes of `Precision` that `precision_of` reads."""
    group.add_argument("--compute", choices=DTYPES, help="dtype of forward and backward (no casts)")
    group.add_argument("--reduce", choices=DTYPES, default="fp32", help="dtype in which gradients are summed (fp32)")


def dtype_of(name: str) -> "torch.dtype":
    """Return the dtype that an option chooses."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def precision_of(options: Namespace) -> "Precision":
    """Return the precision of a command line. `--master` is included if the command has it.

    Raises:
        ValueError: the dtypes do not go together.
    """
    from shardlite.config import Precision

    return Precision(
        compute=None if options.compute is None else dtype_of(options.compute),
        reduce=dtype_of(options.reduce),
        master="split24" if getattr(options, "master", "fp32") == "split24" else dtype_of("fp32"),
    )


def started_ranks(parser: ArgumentParser, options: Namespace) -> int | None:
    """Return the number of ranks that a launcher has started, or `None`. Exit if `--ranks` is another number."""
    started = world_size()
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks is {options.ranks}; it must be at least 1")
    if options.ranks is not None and started not in (None, options.ranks):
        parser.error(f"--ranks is {options.ranks}, but torchrun has started {started}: leave it out")
    return started


def progress(words: str) -> None:
    """Print to standard error what begins now."""
    print(f"{words} ...", file=sys.stderr, flush=True)


@contextmanager
def usage_errors(parser: ArgumentParser, plots: str | None = None) -> Iterator[None]:
    """Exit with status 2 and one line if the block raises an error of its options.

    Args:
        parser: prints the line.
        plots: what needs matplotlib or Jinja2: an option, or the command.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        package = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}.get(str(missing.name).split(".")[0])
        if plots is None or package is None:
            raise
        parser.error(f"{plots} needs {package}, which is not installed; pip install 'shardlite[demo]'")
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))


def check_numbers(options: Namespace, **least: int) -> None:
    """Raise an error if an option is smaller than its least value. `None` means that it was not given.

    Raises:
        ValueError: the message names the option.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name} must be at least {smallest}, got {value}")


def check_file(option: str, path: Path | None) -> None:
    """Raise an error if `path` cannot be a file. `None` means that the option was not given.

    Raises:
        OSError: the folder of `path` does not exist, or `path` is a folder.
    """
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; a file is needed")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.absolute().parent}")


def check_folder(option: str, path: Path | None) -> None:
    """Raise an error if `path` is a file. A folder that does not exist is created later.

    Raises:
        OSError: `path` is a file.
    """
    if path is not None and path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{option} {path} is a file; a folder is needed")
