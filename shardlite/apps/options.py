"""What commands share: options, their checks, and how wrong usage ends a command."""

import json
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.apps.demo.settings import LOGS, OPTIMIZERS, PRECISIONS, SIZES, TRANSPORTS
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


_DESCRIBED = json.loads(Path(__file__).with_name("options.json").read_text())
_NAMED: Mapping[str, Mapping[str, Any]] = {
    "type": {"int": int, "float": float, "path": Path},
    "action": {"switch": BooleanOptionalAction, "store_true": "store_true"},
    "choices": {
        **{"DTYPES": DTYPES, "STATES": STATES, "ALGORITHMS": ALGORITHMS},
        **{"SIZES": SIZES, "OPTIMIZERS": OPTIMIZERS, "PRECISIONS": PRECISIONS, "TRANSPORTS": TRANSPORTS, "LOGS": LOGS},
    },
}
"""Values that `options.json` has by name."""


def add_command(
    commands: Any, name: str, run: Callable[[ArgumentParser, Namespace, Sequence[str]], int], **defaults: Any
) -> ArgumentParser:
    """Add a command with the options that `options.json` describes, and return its parser.

    Args:
        commands: the subparsers of the program.
        name: name of the command.
        run: called with the parser, the parsed options and the whole command line; returns the exit status.
        **defaults: values of options that are not given.
    """
    described = _DESCRIBED["commands"][name]
    parser: ArgumentParser = commands.add_parser(name, help=described["help"], description=described["description"])
    for title, group in described["groups"].items():
        add_options(parser.add_argument_group(title, group.get("about")) if title else parser, group)
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments), **defaults)
    return parser


def add_options(group: Any, described: Mapping[str, Any]) -> None:
    """Add options to a parser or a group. `@name` stands for options that several commands have."""
    for name, each in described.items():
        if name.startswith("@"):
            add_options(group, _DESCRIBED["shared"][name[1:]])
        elif name != "about":  # the description of the group
            named = {key: known[each[key]] for key, known in _NAMED.items() if isinstance(each.get(key), str)}
            group.add_argument(name, **{**each, **named})


def add_precision(group: Any) -> None:
    """Add the dtypes of `Precision` that `precision_of` reads."""
    add_options(group, {"@precision": {}})


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
