"""Values of each step during the run: printed, and written to a CSV file or for TensorBoard."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlite.apps.demo.report import Point, Progress
from shardlite.model import ShardLite

COLUMNS = (
    *("loss", "validation_loss", "learning_rate", "gradient_norm"),
    *("step_ms", "exposed_ms", "sent_mib", "held_mib"),
)
"""Values of a step. The losses are means over the ranks, in nats per byte, and the norm is that before clipping. The
last four are rank 0's: milliseconds of the step, milliseconds that computation waited for messages and MiB sent since
the step before (for a validation, too), and MiB held by the library after it.
"""

Values = Mapping[str, float | None]
"""By column; `None`: the step has no such value."""


@dataclass(frozen=True)
class Step:
    """Values of one step."""

    loss: float
    """Mean over ranks and batches, in nats per byte."""

    rate: float
    """Learning rate."""

    norm: float | None
    """Norm of the gradients before clipping; `None` if steps in the backward leave none."""

    seconds: float


def open_log(kind: str, folder: Path, *, after: int) -> CSVLog | TensorBoardLog:
    """Open the log of a run in its folder. Rows that an earlier process wrote for steps after `after` are dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    return CSVLog(folder / "log.csv", after) if kind == "csv" else TensorBoardLog(folder / "tensorboard", after)


class CSVLog:
    """A CSV file with a row per step. It can be read during the run."""

    def __init__(self, path: Path, after: int) -> None:
        kept = _rows_up_to(path, after) if after else []
        self._file = path.open("w", newline="")
        self._rows = csv.DictWriter(self._file, ["step", *COLUMNS])
        self._rows.writeheader()
        self._rows.writerows(kept)

    def write(self, step: int, values: Values) -> None:
        """Append a row."""
        told = {name: "" if value is None else f"{value:.9g}" for name, value in values.items()}
        self._rows.writerow({"step": step, **told})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _rows_up_to(path: Path, last: int) -> list[dict[str, str]]:
    """Return the rows of a log up to a step; none if there is no log with these columns."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        alike = reader.fieldnames == ["step", *COLUMNS]
        return [row for row in reader if alike and row["step"].isdigit() and int(row["step"]) <= last]


class TensorBoardLog:
    """Curves for TensorBoard."""

    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=after + 1)

    def write(self, step: int, values: Values) -> None:
        """Add a point to each curve that has a value."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the log."""
        self._writer.close()


class Reporter:
    """Prints and logs the steps of a run. Only rank 0 has one."""

    def __init__(self, model: ShardLite, progress: Progress, log: CSVLog | TensorBoardLog | None) -> None:
        self._model, self._progress, self._log = model, progress, log
        self._sent = self._traffic()

    def show(self, step: Step, point: Point) -> None:
        """Print and log a finished step and its point of the loss curve."""
        held = sum(each.now for each in self._model.memory().values())
        self._progress.show(point, held)
        if self._log is not None:
            self._log.write(point.step, self._values(step, point, held))

    def close(self) -> None:
        """End the progress line and close the log."""
        self._progress.end()
        if self._log is not None:
            self._log.close()

    def _values(self, step: Step, point: Point, held: int) -> Values:
        before, self._sent = self._sent, self._traffic()
        nbytes, exposed = (now - then for now, then in zip(self._sent, before, strict=True))
        return {
            "loss": point.train,
            "validation_loss": point.validation,
            "learning_rate": step.rate,
            "gradient_norm": step.norm,
            "step_ms": 1e3 * step.seconds,
            "exposed_ms": 1e3 * exposed,
            "sent_mib": nbytes / 2**20,
            "held_mib": held / 2**20,
        }

    def _traffic(self) -> tuple[int, float]:
        """Return the bytes sent so far, and the seconds that computation has waited."""
        sent = [each for purposes in self._model.traffic().values() for each in purposes.values()]
        return sum(each.nbytes for each in sent), sum(each.exposed for each in sent)
