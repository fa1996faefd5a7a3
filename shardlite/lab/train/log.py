"""Print the values of each step during the run, and write them to a CSV file or for TensorBoard."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlite.lab.train.report import Point, Progress, StepTraffic
from shardlite.model import ShardLite

COLUMNS = (
    *("loss", "validation_loss", "learning_rate", "gradient_norm"),
    *("step_ms", "exposed_ms", "sent_mib", "held_mib"),
)
"""Names of the logged values of a step.

Losses are means over the ranks, in nats per byte. The gradient norm is the norm before clipping. The last four values
belong to rank 0: duration of the step, time that computation waited for messages, bytes sent, and bytes held by the
library after the step. The waiting time and the bytes sent are counted since the previous row, without validations.
"""

Values = Mapping[str, float]
"""The values of a step by column. A column without a value has no entry."""


def open_log(kind: str, folder: Path, *, after: int) -> CSVLog | TensorBoardLog:
    """Open the log of a run in `folder`. Discard rows of an earlier process for steps after step number `after`."""
    folder.mkdir(parents=True, exist_ok=True)
    return CSVLog(folder / "log.csv", after) if kind == "csv" else TensorBoardLog(folder / "tensorboard", after)


class CSVLog:
    """A CSV file with a row per step. Other programs can read the file during the run."""

    def __init__(self, path: Path, after: int) -> None:
        columns, kept = ["step", *COLUMNS], []
        if after and path.is_file():
            with path.open(newline="") as file:
                rows = csv.DictReader(file)
                alike = rows.fieldnames == columns
                kept = [row for row in rows if alike and row["step"].isdigit() and int(row["step"]) <= after]
        self._file = path.open("w", newline="")
        self._rows = csv.DictWriter(self._file, columns)
        self._rows.writeheader()
        self._rows.writerows(kept)

    def write(self, step: int, values: Values) -> None:
        """Append a row."""
        self._rows.writerow({"step": step, **{name: f"{value:.9g}" for name, value in values.items()}})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLog:
    """Curves for TensorBoard."""

    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=after + 1)

    def write(self, step: int, values: Values) -> None:
        """Add a point to the curve of each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the log."""
        self._writer.close()


class Reporter:
    """Prints and logs the steps of a run. Only rank 0 has a reporter."""

    def __init__(
        self, model: ShardLite, traffic: StepTraffic, progress: Progress, log: CSVLog | TensorBoardLog | None
    ) -> None:
        self._model, self._traffic, self._progress, self._log = model, traffic, progress, log

    def show(self, point: Point, values: Values) -> None:
        """Print and log a finished step. The log also gets the traffic and the memory of this rank."""
        held = sum(each.now for each in self._model.memory().values())
        self._progress.show(point, held)
        if self._log is not None:
            nbytes, _, exposed = self._traffic.step
            own = {"exposed_ms": 1e3 * exposed, "sent_mib": nbytes / 2**20, "held_mib": held / 2**20}
            self._log.write(point.step, {**values, **own})

    def close(self) -> None:
        """End the progress line and close the log."""
        self._progress.end()
        if self._log is not None:
            self._log.close()
