"""The command line: `shardlite COMMAND`.

Each `add_NAME` adds a parser whose default for `run` takes the parsed options and the whole command line, and returns
the exit status. Parsers do not import PyTorch, so help and errors of options appear at once; `run` imports it.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from shardlite import __version__
from shardlite.apps.checkpoint_commands import add_export, add_import, add_inspect
from shardlite.apps.demo.command import add_train
from shardlite.apps.doctor.command import add_doctor
from shardlite.apps.memory.command import add_memory
from shardlite.apps.plan.command import add_plan
from shardlite.apps.report.command import add_report
from shardlite.apps.ring.command import add_ring
from shardlite.apps.verify.command import add_verify

COMMANDS = (
    *(add_train, add_verify, add_doctor, add_plan, add_memory, add_ring, add_report),
    *(add_inspect, add_export, add_import),
)
"""In the order of `shardlite --help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `shardlite ARGV` and return its exit status. Wrong usage exits with status 2, as in argparse."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="shardlite", description="Sharded training for PyTorch, small enough to read.")
    parser.add_argument("--version", action="version", version=f"shardlite {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options, arguments)
    return status


class _Parser(ArgumentParser):
    """A parser, also of commands, for which wrong usage is one line instead of a page of usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Namespace, list[str]]:  # type: ignore[override]
        """Parse options. An unknown one is reported by its command, not by the program."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
