"""The command line: `shardlite COMMAND`.

`options.json` describes the commands. The function `run` of a command takes the parser of the command, the parsed
options and the whole command line, and returns the exit status. Parsers do not import PyTorch, so help and usage errors
appear immediately.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from shardlite import __version__
from shardlite.cli.options import COMMANDS, add_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run `shardlite ARGV` and return its exit status. On wrong usage, exit with status 2, as argparse does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="shardlite", description="Sharded training for PyTorch, small enough to read.")
    parser.add_argument("--version", action="version", version=f"shardlite {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        add_command(commands, name)
    options = parser.parse_args(arguments)
    if options.needs and find_spec(options.needs) is None:
        options.parser.error(f"its models need {options.needs}, which is not installed; pip install 'shardlite[demo]'")
    module, _, function = options.run.partition(":")
    run = getattr(import_module(f"shardlite.{module}"), function)
    status: int = run(options.parser, options, arguments)
    return status


class _Parser(ArgumentParser):
    """A parser that reports wrong usage in one line, without the usage message. Each command has such a parser."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Namespace, list[str]]:  # type: ignore[override]
        """Parse the arguments. Exit if an argument is unknown. A command's parser checks the command's arguments."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print `message` in one line and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
