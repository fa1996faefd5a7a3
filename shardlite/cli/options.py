"""Parsers of the commands, checks of options, and errors of usage.

`options.json` describes the commands and their options. The key `run` of a command names the function that runs the
command, as `module:name` inside `shardlite`.
"""

import json
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.cli.launch import world_size

if TYPE_CHECKING:
    import torch

    from shardlite.config import Precision

MOST_RANKS = 4096
"""Maximum number of ranks of a plan: a copy of `shardlite.plan.MOST_RANKS`, whose module imports PyTorch."""

_DESCRIBED = json.loads(Path(__file__).with_name("options.json").read_text())
COMMANDS: Mapping[str, Mapping[str, Any]] = _DESCRIBED["commands"]
"""Descriptions of the commands, in the order of `shardlite --help`."""


def _names(value: str) -> tuple[str, ...]:
    """Return the names in a value, which are separated by commas."""
    return tuple(filter(None, map(str.strip, value.split(","))))


def _offload(value: str) -> bool | int | float:
    """Return the argument `offload` of `ShardLite` for a value: `true`, a share, or an amount such as `4GB`.

    Raises:
        ArgumentTypeError: the value is none of these.
    """
    from shardlite.plan import nbytes_of

    if value.lower() == "true":
        return True
    if (nbytes := nbytes_of(value)) is not None:
        return nbytes
    with suppress(ValueError):
        if 0 <= float(value) <= 1:
            return float(value)
    raise ArgumentTypeError(
        f"{value!r} is neither true, nor a share of the states (0.5), nor an amount that stays on the GPU (4GB)"
    )


_NAMED = {
    **{"int": int, "float": float, "path": Path, "names": _names, "offload": _offload},
    **{"switch": BooleanOptionalAction, "hidden": SUPPRESS},
}
"""The Python objects for the names that `options.json` uses."""


def add_command(commands: Any, name: str) -> None:
    """Add a command to the subparsers of the program. The parsed options include `parser` and `run` of the command."""
    described = COMMANDS[name]
    parser: ArgumentParser = commands.add_parser(name, help=described["help"], description=described["description"])
    if "settings" in described:  # a dataclass with the defaults of options
        module, _, settings = described["settings"].partition(":")
        every = fields(getattr(import_module(f"shardlite.{module}"), settings))
        kept = [each for each in every if each.name not in ("gpt", "save_every")]
        parser.set_defaults(**{each.name: each.default for each in kept})
    parser.set_defaults(parser=parser, run=described["run"], needs=described.get("needs"))
    for title, group in described["groups"].items():
        add_options(parser.add_argument_group(title, group.get("about")) if title else parser, group)


def add_options(group: Any, described: Mapping[str, Any]) -> None:
    """Add options to a parser or a group.

    A key `@name` stands for the shared options `name`. The value of the key overrides parts of these options.
    """
    for name, each in described.items():
        if name.startswith("@"):
            shared = _DESCRIBED["shared"][name[1:]]
            add_options(group, {key: {**option, **each.get(key, {})} for key, option in shared.items()})
        elif name != "about":  # `about` is the description of the group
            named = {key: _NAMED.get(each[key], each[key]) for key in ("type", "action", "help") if key in each}
            group.add_argument(name, **{**each, **named})


def dtype_of(name: str) -> "torch.dtype":
    """Return the dtype that the value of an option names."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}[name]


def precision_of(compute: str | None, reduce: str, master: str, keep: Iterable[str] | None = None) -> "Precision":
    """Return the `Precision` that options select. If `compute` is `None`, forward and backward cast nothing.

    Raises:
        ValueError: the dtypes cannot be combined.
    """
    from shardlite.config import Precision

    return Precision(
        compute=None if compute is None else dtype_of(compute),
        keep=keep,
        reduce=dtype_of(reduce),
        master="split24" if master == "split24" else dtype_of(master),
    )


def imported(module: str, name: str) -> Any:
    """Return the attribute `name` of a module. The module may be in the current folder.

    Raises:
        Exception: of any kind, because the import runs the code of the module.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return getattr(import_module(module), name)


def started_ranks(parser: ArgumentParser, options: Namespace) -> int | None:
    """Return the number of ranks that a launcher has started, or `None` if no launcher started this process.

    If `--ranks` differs from this number, exit.
    """
    started = world_size()
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks is {options.ranks}; it must be at least 1")
    if options.ranks is not None and started not in (None, options.ranks):
        parser.error(f"--ranks is {options.ranks}, but torchrun has started {started} ranks: omit --ranks")
    return started


def progress(words: str) -> None:
    """Print the name of the next phase to standard error."""
    print(f"{words} ...", file=sys.stderr, flush=True)


@contextmanager
def usage_errors(parser: ArgumentParser, plots: str | None = None) -> Iterator[None]:
    """Exit with status 2 and one line if the `with` block raises an error that the options of the command caused.

    Args:
        parser: the parser of the command, which prints the line.
        plots: the option that requires matplotlib.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if plots is None or str(missing.name).split(".")[0] != "matplotlib":
            raise
        parser.error(f"{plots} needs matplotlib, which is not installed; pip install 'shardlite[demo]'")
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))


def check_numbers(options: Namespace, **least: int) -> None:
    """Check that options have at least their minimum values. An option that was not given is `None` and not checked.

    Raises:
        ValueError: a value is smaller than its minimum. The message names the option.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name} must be at least {smallest}, got {value}")


def check_file(option: str, path: Path | None) -> None:
    """Check that `path` can be a file. `None` means that the option was not given.

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
    """Check that `path` can be a folder. A folder that does not exist is created later.

    Raises:
        OSError: `path` is a file.
    """
    if path is not None and path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{option} {path} is a file; a folder is needed")
