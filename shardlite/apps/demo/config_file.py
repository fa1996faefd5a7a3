"""Read options of a command from a TOML file. Its keys are the names of the options.

steps = 500
save-every = 50
precision = "bf16"
in-backward = true
"""

import sys
from argparse import Action, ArgumentParser
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any


def read_options(path: Path, parser: ArgumentParser, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the values of a file by their names in the parsed command line.

    Args:
        path: the file.
        parser: the parser of the command.
        without: options that are not allowed in a file.

    Raises:
        ValueError: the file is not TOML, or has an unknown key or an invalid value.
        OSError: the file cannot be read.
    """
    options = {
        text.removeprefix("--"): action
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--") and not text.startswith("--no-")
    }
    known = {name: action for name, action in options.items() if name not in ("help", *without)}
    return dict(_checked(path, known, key, value) for key, value in _read(path).items())


def _read(path: Path) -> Mapping[str, Any]:
    if sys.version_info < (3, 11):
        raise ValueError(f"{path}: option files require Python 3.11 or newer, this is {sys.version.split()[0]}")
    tomllib: Any = import_module("tomllib")  # Python 3.10, which the library runs on, has none
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ValueError(f"{path} is not TOML: {wrong}") from None
    return content


def _checked(path: Path, known: Mapping[str, Action], key: str, value: Any) -> tuple[str, Any]:
    if key not in known:
        near = get_close_matches(key, known, n=1)
        remedy = f"; did you mean {near[0]!r}?" if near else ""
        remedy = "; options must be at the top level" if isinstance(value, dict) else remedy
        raise ValueError(f"{path}: unknown option {key!r}, got {_toml(value)}{remedy}")
    action = known[key]
    wanted: Any = bool if action.nargs == 0 else action.type or str
    if not _is(value, wanted):
        kinds = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ValueError(f"{path}: {key} must be {kinds.get(wanted, 'a string')}, got {_toml(value)}")
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{path}: {key} must be one of {', '.join(map(str, action.choices))}; got {_toml(value)}")
    return action.dest, value if wanted is bool else wanted(value)


def _is(value: object, wanted: Any) -> bool:
    if wanted is bool or isinstance(value, bool):
        return wanted is bool and isinstance(value, bool)
    if wanted in (int, float):
        return isinstance(value, int | wanted)
    return isinstance(value, str)


def _toml(value: object) -> str:
    """Format a value as in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    return f'"{value}"' if isinstance(value, str) else str(value)
