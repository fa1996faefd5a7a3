"""Reports of the demo: progress, the result, a loss curve as PNG and CSV, and a table of bytes per rank."""

from __future__ import annotations

import csv
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from shardlite.lab.memory.peak import Footprint
from shardlite.lab.plots import COLOURS, draw_curves, new_figure, save
from shardlite.lab.table import aligned
from shardlite.model import ShardLite
from shardlite.telemetry import format_bytes

_SILENCE = 60.0
"""Maximum number of seconds between two lines if the output is not a terminal."""


@dataclass(frozen=True)
class Point:
    """One step of the loss curve, in nats per byte, averaged over the ranks."""

    step: int
    train: float
    validation: float | None
    """`None` for steps without a validation."""


class Progress:
    """Prints the progress of a run: on a terminal, one line that is rewritten in place; otherwise lines at intervals.

    Args:
        steps: number of steps of the run.
        bytes_per_step: number of bytes of text in a step.
        out: the file to which lines are printed.
        first: number of steps that earlier processes have taken.
    """

    def __init__(self, steps: int, bytes_per_step: int, out: TextIO = sys.stdout, *, first: int = 0) -> None:
        self._steps, self._bytes_per_step, self._out, self._first = steps, bytes_per_step, out, first
        self._begin = self._printed = perf_counter()
        self._validation: str | None = None
        self._is_open = False

    def show(self, point: Point, held: int) -> None:
        """Show `point`, the remaining time, the training speed, and the bytes that the library holds (`held`)."""
        if point.validation is not None:
            self._validation = f"val {point.validation:.3f}"
        if self._out.isatty():
            width = shutil.get_terminal_size().columns - 1  # a full line would wrap
            print(f"\r\033[K{self._line(point, held, width)}", end="", file=self._out, flush=True)
            self._is_open = True
        elif self._is_due(point.step):
            print(self._line(point, held), file=self._out, flush=True)
            self._printed = perf_counter()

    def end(self) -> None:
        """End the line on a terminal, so that later output starts on a new line."""
        if self._is_open:
            print(file=self._out, flush=True)
            self._is_open = False

    def _is_due(self, step: int) -> bool:
        """Return whether to print a line.

        A line is due after the first step, after each tenth of the run, and if none was printed for a minute.
        """
        tenth = step % max(1, self._steps // 10) == 0
        return step in (1, self._steps) or tenth or perf_counter() - self._printed >= _SILENCE

    def _line(self, point: Point, held: int, width: int | None = None) -> str:
        """Return the line. If it is longer than `width` characters, leave out the less important parts."""
        passed, taken = perf_counter() - self._begin, point.step - self._first
        left = passed / taken * (self._steps - point.step)
        parts = [
            f"step {point.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {point.train:.3f}",
            *([self._validation] if self._validation else []),
            f"{duration(left)} left" if point.step < self._steps else f"took {duration(passed)}",
            f"{taken * self._bytes_per_step / passed:,.0f} tokens/s",
            f"{format_bytes(held)} held",
        ]
        while width is not None and len("  ".join(parts)) > width and len(parts) > 1:
            parts.pop()
        return "  ".join(parts)[:width]


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, and hours if there are any: `duration(61)` is `"1:01"`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def describe_result(loss: float, entropy: float) -> str:
    """Format the final validation loss and the unigram entropy of the validation text."""
    rows = (("validation loss", loss, "this model"), ("unigram entropy", entropy, "the best without context"))
    return "\n".join(
        f"{name}  {nats:.3f} nats/byte  {nats / math.log(2):.3f} bits/byte  ({who})" for name, nats, who in rows
    )


def printable(text: bytes) -> str:
    """Return `text` for a terminal, with invalid UTF-8 and control characters replaced."""
    decoded = text.decode(errors="replace")
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in decoded
    )


Totals = tuple[float, float, float]
"""Bytes sent, seconds of collectives, and seconds that computation waited for them."""


class StepTraffic:
    """Counts this rank's traffic of each step, without validations.

    The step after a validation finds weights that the validation has gathered, so the mean leaves it out. The traffic
    leaves out gathers that no rank needs. Only validations have such gathers, because all ranks train the same units.
    The gathers may end after the validation.
    """

    def __init__(self, model: ShardLite) -> None:
        """Begin to count. On a GPU, this starts the measurement of time."""
        self._model, self._steps = model, list[Totals]()
        self.step: Totals = (0, 0.0, 0.0)
        """Traffic of the latest step: bytes sent, duration of the collectives, and the time that computation waited."""
        self._before, self._follows_validation = self._all(), False

    def end_step(self) -> None:
        """Count a step that has ended."""
        before, self._before = self._before, self._all()
        self.step = _less(self._before, before)
        if self._follows_validation:
            self._follows_validation = False
        else:
            self._steps.append(self.step)

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leave out a validation, which runs inside this context."""
        yield
        self._before, self._follows_validation = self._all(), True

    def mean(self) -> Totals:
        """Return the mean of the steps that did not follow a validation."""
        nbytes, seconds, exposed = (sum(each) / len(self._steps) for each in zip(*self._steps, strict=True))
        return nbytes, seconds, exposed

    def _all(self) -> Totals:
        units = self._model.traffic().values()
        sent = [each for purposes in units for purpose, each in purposes.items() if purpose != "take part"]
        return sum(each.nbytes for each in sent), sum(each.seconds for each in sent), sum(each.exposed for each in sent)


def _less(totals: Totals, others: Totals) -> Totals:
    return totals[0] - others[0], totals[1] - others[1], totals[2] - others[2]


def describe_traffic(mean: Totals) -> str:
    """Format the traffic of a mean step: bytes sent, duration of collectives, and time that computation waited."""
    nbytes, seconds, exposed = mean
    return (
        f"A step sends {format_bytes(int(nbytes))} per rank. Gathers and reductions take\n"
        f"{seconds * 1e3:.1f} ms, of which computation waits for {exposed * 1e3:.1f} ms."
    )


def footprint_table(sharded: Sequence[Footprint], plain: Footprint) -> str:
    """Format bytes by purpose: a column per rank of the sharded run, and a column for plain data parallel."""
    each = (*sharded, plain)
    purposes = dict.fromkeys(purpose for footprint in (plain, *sharded) for purpose in footprint.held)
    rows = {purpose: [footprint.held.get(purpose, 0) for footprint in each] for purpose in purposes}
    rows["activations, rest"] = [footprint.activations for footprint in each]
    rows["measured peak"] = [footprint.peak for footprint in each]
    head = ["", *(f"rank {rank}" for rank in range(len(sharded))), "data parallel"]
    return aligned([head, *([name, *map(format_bytes, cells)] for name, cells in rows.items())])


def write_curve(folder: Path, curve: Sequence[Point], entropy: float) -> list[str]:
    """Write `loss.csv` and, if matplotlib is installed, `loss.png`. Return a line about each file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "train_nats_per_byte", "validation_nats_per_byte"])
        for point in curve:
            validation = "" if point.validation is None else f"{point.validation:.6f}"
            writer.writerow([point.step, f"{point.train:.6f}", validation])
    png = f"wrote {folder / 'loss.png'}"
    try:
        _write_png(folder / "loss.png", curve, entropy)
    except ModuleNotFoundError as missing:
        png = f"no {folder / 'loss.png'}: {missing.name} is not installed; pip install 'shardlite[demo]'"
    return [f"wrote {folder / 'loss.csv'}", png]


def _write_png(path: Path, curve: Sequence[Point], entropy: float) -> None:
    figure, (axes,) = new_figure(7.2, 4.2)
    validated = [(point.step, point.validation) for point in curve if point.validation is not None]
    steps, losses = zip(*validated, strict=True)
    curves = {"training": ([p.step for p in curve], [p.train for p in curve]), "validation": (steps, losses)}
    styles = [{"color": COLOURS[0], "linewidth": 1}, {"color": COLOURS[1], "marker": "o", "markersize": 4}]
    labels: dict[str, Any] = {"xlabel": "step", "ylabel": "loss, nats per byte", "title": "A byte-level GPT learns"}
    level = f"unigram entropy, {entropy:.2f}", entropy
    draw_curves(axes, curves, styles, level=level, xlim=(0, curve[-1].step), **labels)
    save(figure, path)
