"""Tables of memory: rows of several systems, and one step by purpose beside its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from shardlite.apps.memory.measure import Row
from shardlite.apps.memory.timeline import PURPOSES, Timeline
from shardlite.apps.plan.plan import RankPlan, Setting
from shardlite.apps.plan.report import words
from shardlite.apps.plan.source import Source
from shardlite.apps.tables import aligned
from shardlite.build import ACTIVATIONS, StepTimeline, timeline_of

_MALLOC = {"returns": "malloc returns large blocks", "default": "malloc as it is by default"}

_COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "system": ("system", lambda row: str(row["system"])),
    "step, MiB": ("pss_bytes", lambda row: _mib(row["pss_bytes"])),
    "/ FSDP2's": ("pss_vs_fsdp2", lambda row: f"{row['pss_vs_fsdp2']:.2f}"),
    "tensors, MiB": ("tensor_bytes", lambda row: _mib(row["tensor_bytes"])),
    "predicted, MiB": ("predicted_bytes", lambda row: _mib(row["predicted_bytes"])),
    "measured / predicted": ("predicted_bytes", lambda row: f"{row['tensor_bytes'] / row['predicted_bytes']:.3f}"),
    "between steps, MiB": ("between_bytes", lambda row: _mib(row["between_bytes"])),
    "made, MiB": ("made_bytes", lambda row: _mib(row["made_bytes"])),
    "wrapping, MiB": ("wrap_peak_bytes", lambda row: _mib(row["wrap_peak_bytes"])),
    "unexplained": ("unexplained", lambda row: f"{100 * row['unexplained']:+.1f} %"),
}
"""The key that each column needs, and its cells. A table has the columns whose key is in one of its rows."""


def runs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows that differ in the system only. In each, systems that failed come last."""
    for _, run in groupby(rows, key=lambda row: (row["model"], row["ranks"], row.get("malloc"), row.get("busy"))):
        yield sorted(run, key=lambda row: "error" in row)


def model_stem(row: Row) -> str:
    """Return the name of a file of all rows of a model, without its ending: `footprint-gpt2`."""
    return "footprint-" + "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in row["model"])


def run_stem(row: Row) -> str:
    """Return the name of a file of the run of a row, without its ending: `footprint-gpt2-2ranks-busy`."""
    ways = ["default-malloc"] * (row.get("malloc") == "default") + ["busy"] * bool(row.get("busy"))
    return "-".join([model_stem(row), f"{row['ranks']}ranks", *ways])


def render(rows: Sequence[Row], table: Callable[[list[list[str]]], str] = aligned) -> str:
    """Return one table for each run, as text, or as `table` formats cells."""
    return "\n\n".join(_render_run(run, table) for run in runs(rows))


def by_purpose(source: Source, comparison: Comparison, theirs: Timeline) -> str:
    """Format a comparison by purpose, and the peak of FSDP2."""
    rows = [["MiB of rank 0, each at its peak", "predicted", "measured", "beyond"]]
    for name, least, most, measured in comparison.rows():
        beyond = comparison.beyond(least, most, measured)
        cells = [name, _range(least, most), _mib(measured, 2), f"{100 * beyond:+.2f} %" if beyond else "0 %"]
        rows.append(cells)
    rows.append(["FSDP2, all together", "", _mib(theirs.peak, 2), ""])
    setting = comparison.plan.setting
    return f"{heading(source, setting)}\n{words(setting)}\n\n{aligned(rows)}"


def heading(source: Source, setting: Setting) -> str:
    """Return the model, the ranks and the batch."""
    ranks = "1 rank" if setting.world_size == 1 else f"{setting.world_size} ranks"
    return f"{source.name} on {ranks}, {source.words}"


@dataclass(frozen=True)
class Comparison:
    """A plan, and a step that was recorded."""

    plan: RankPlan
    timeline: Timeline

    @cached_property
    def prompt(self) -> StepTimeline:
        """Return the timeline of a step whose reductions end before the next gradient: a run holds no less."""
        return timeline_of(self.plan.budget, self.plan.events, prompt=True)

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield each purpose with its predicted bytes at least and at most, and its measured bytes, at its own peak."""
        late, prompt, measured = self.plan.timeline.most, self.prompt.most, self.timeline.most
        for name in (*PURPOSES, ACTIVATIONS):
            bounds = sorted((prompt.get(name, 0), late.get(name, 0)))
            if bounds[1] or measured.get(name):
                yield name, bounds[0], bounds[1], measured.get(name, 0)
        yield "all together", self.prompt.total, self.plan.peak, self.timeline.peak

    def beyond(self, least: int, most: int, measured: int) -> float:
        """Return how far `measured` lies outside of the predicted bounds, as a fraction of the nearer one."""
        nearest = min(max(measured, least), most)
        return (measured - nearest) / nearest if nearest else float(measured > 0)


def _render_run(run: Sequence[Row], table: Callable[[list[list[str]]], str]) -> str:
    failures = [f"{row['system']} failed: {row['error'].splitlines()[0]}" for row in run if "error" in row]
    measured = [row for row in run if "error" not in row]
    if not measured:
        return "\n".join([f"{run[0]['model']}, {run[0]['ranks']} CPU ranks", *failures])
    keys = {key for row in measured for key in row}
    columns = {name: column for name, column in _COLUMNS.items() if column[0] in keys}
    cells = [[cell(row) if key in row else "" for key, cell in columns.values()] for row in measured]
    return "\n\n".join([_heading(measured[0]), table([list(columns), *cells]), *failures])


def _heading(row: Row) -> str:
    """Return what is common to all rows of a run."""
    busy = f", {row['busy']} busy loops beside" * bool(row["busy"])
    return (
        f"{row['words']} per rank, {row['parameters'] / 1e6:.1f}M parameters; {row['ranks']} CPU ranks{busy}; "
        f"{_MALLOC[row['malloc']]}; {row['machine']}, torch {row['torch']}, {row['date']}."
    )


def _range(least: int, most: int) -> str:
    """Format two bounds. They differ if the peak depends on when reductions end."""
    return _mib(most, 2) if _mib(least, 2) == _mib(most, 2) else f"{_mib(least, 2)} to {_mib(most, 2)}"


def _mib(nbytes: int, digits: int = 0) -> str:
    return f"{nbytes / 2**20:.{digits}f}"
