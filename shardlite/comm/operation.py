"""The name of a collective: it distinguishes its messages, counts them, and explains its errors."""

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple
from zlib import crc32

from torch import Tensor

from shardlite.comm.control.failure_reports import FailureReports
from shardlite.comm.executor import Channel
from shardlite.comm.traffic import Tally
from shardlite.comm.transport.base import Transport
from shardlite.errors import CommError


class Operation(NamedTuple):
    """The name of a collective, equal on every rank: `Operation("all-gather of unit 'blocks.0'", 17)`.

    `sequence` distinguishes repeated operations with one label.
    """

    label: str = "unnamed collective"
    sequence: int = 0
    reports: FailureReports | None = None
    """Failure reports, which describe on an error what the other ranks are doing."""

    during: str = ""
    """Detail for error messages. It is not part of the name: ranks may differ in it."""

    tally: Tally | None = None
    """Counts the messages that this rank sends."""

    def tag(self, full: Tensor, cuts: Sequence[int] = (), algorithm: str = "") -> int:
        """Return a message tag shared only by ranks that run the same operation on a like buffer in the same way.

        Ranks that disagree do not mix data: their receives stay unanswered and end in a `CommError`. (NCCL has no tags,
        so nothing separates such ranks.) The tag is 31 bits of a CRC, so ranks need not agree on a registry of labels;
        two names collide with probability 2^-31.
        """
        what = f"{self.label}\n{self.sequence}\n{full.dtype}\n{full.numel()}\n{list(cuts)}\n{algorithm}"
        return crc32(what.encode()) & 0x7FFFFFFF

    def channel(self, transport: Transport, full: Tensor, cuts: Sequence[int] = (), algorithm: str = "") -> Channel:
        """Return the links of this rank in the operation."""
        return Channel(transport, self.tag(full, cuts, algorithm), self.tally)

    def count_collective(self, nbytes: int, across: int = 0) -> None:
        """Count a whole collective, in which this rank sends `nbytes`, of them `across` nodes, as one message."""
        if self.tally is not None:
            self.tally.messages += 1
            self.tally.nbytes += nbytes
            self.tally.across += across


UNNAMED = Operation()
"""The name for programs that run one collective at a time."""


class Running(NamedTuple):
    """Context that adds the operation and `full` to a transport's error, which knows only ranks and bytes."""

    operation: Operation
    full: Tensor

    def __enter__(self) -> None:
        reports = self.operation.reports
        if reports is not None:
            if reports.failed:
                why = f"not started, because this rank has failed before: {reports.failed}"
                raise CommError(f"{self}: {why}{reports.compare(str(self), why)}")
            reports.begin_operation(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        operation, full = self
        if operation.reports is not None:
            operation.reports.end_operation(self)
        if isinstance(error, CommError):
            during = f", during {operation.during}" if operation.during else ""
            which = f"operation {operation.sequence}, {full.numel()} elements of {full.dtype}"
            what = f"{operation.label}{during} ({which})"
            others = "" if operation.reports is None else operation.reports.compare(what, str(error))
            raise CommError(f"{what}: {error}{others}") from error

    def __str__(self) -> str:
        """Return the name that all ranks in this operation share."""
        return f"{self.operation.label} ({self.operation.sequence})"
