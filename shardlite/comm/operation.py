"""Names of collectives. A name identifies the messages, the traffic counts and the errors of one collective."""

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple
from zlib import crc32

from torch import Tensor

from shardlite.comm.control.failure_reports import FailureReports
from shardlite.comm.traffic import Tally
from shardlite.errors import CommError


class Operation(NamedTuple):
    """The name of a collective, equal on every rank: `Operation("all-gather of unit 'blocks.0'", 17)`."""

    label: str = "unnamed collective"
    sequence: int = 0
    """Distinguishes operations that have the same name."""

    reports: FailureReports | None = None
    """Failure reports, which describe what the other ranks are doing if the operation fails."""

    during: str = ""
    """Detail for error messages. It is not part of the name and may differ between ranks."""

    tally: Tally | None = None
    """Counts the messages that this rank sends."""

    model: int | None = None
    """Number of the wrapped model, if the name contains it."""

    step: int | None = None
    """Number of the model's step, if the name contains it."""

    @property
    def name(self) -> str:
        """The label, the model and the step. The text is made only for tags and errors."""
        model = "" if self.model is None else f" of model {self.model}"
        return f"{self.label}{model}" if self.step is None else f"{self.label}{model} at step {self.step}"

    def tag(self, full: Tensor, cuts: Sequence[int] = (), algorithm: str = "") -> int:
        """Return the tag of the operation's messages: a hash of the operation, the buffer's layout and the algorithm.

        Ranks that run different operations use different tags. So the ranks never mix their data: receives time out
        and raise a `CommError`. (Over NCCL, which has no tags, nothing separates such ranks.) The tag is a 31-bit CRC:
        no registry of labels is needed, and two names collide with probability 2^-31.
        """
        what = f"{self.name}\n{self.sequence}\n{full.dtype}\n{full.numel()}\n{list(cuts)}\n{algorithm}"
        return crc32(what.encode()) & 0x7FFFFFFF

    def count_sent(self, chunk: Tensor) -> None:
        """Count a sent message."""
        if self.tally is not None:
            self.tally.count(chunk)

    def count_collective(self, nbytes: int, across: int = 0) -> None:
        """Count a whole collective as one sent message of `nbytes` bytes, of which `across` bytes go to other nodes."""
        if self.tally is not None:
            self.tally.messages += 1
            self.tally.nbytes += nbytes
            self.tally.across += across


UNNAMED = Operation()
"""The default name. It suffices for programs that run one collective at a time."""


class Running(NamedTuple):
    """Context manager of a running collective on the buffer `full`.

    It adds the operation and the buffer to a transport's error, which names only ranks and bytes.
    """

    operation: Operation
    full: Tensor

    def __enter__(self) -> None:
        reports = self.operation.reports
        if reports is not None:
            if reports.failed:
                why = f"not started, because this rank has failed before: {reports.failed}"
                others = reports.compare(str(self), why)
                with reports.deciding:  # another thread may still compare the ranks
                    reports.raise_verdict()
                raise CommError(f"{self}: {why}{others}")
            reports.begin_operation(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        operation, full = self
        if operation.reports is not None:
            operation.reports.end_operation(self)
        if isinstance(error, CommError):
            during = f", during {operation.during}" if operation.during else ""
            which = f"operation {operation.sequence}, {full.numel()} elements of {full.dtype}"
            what = f"{operation.name}{during} ({which})"
            others = "" if operation.reports is None else operation.reports.compare(what, str(error))
            raise CommError(f"{what}: {error}{others}") from error

    def __str__(self) -> str:
        """Return the name of the operation and its size. Ranks that run one operation together have equal texts."""
        return f"{self.operation.name} ({self.operation.sequence}, {self.full.numel()} elements)"
