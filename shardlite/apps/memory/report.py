"""What `shardlite memory` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlite.apps.memory.recorder import PURPOSES, Timeline
from shardlite.apps.plan.plan import RankPlan, Setting
from shardlite.apps.plan.report import words
from shardlite.apps.plan.source import Source
from shardlite.build import ACTIVATIONS, Course, course_of


@dataclass(frozen=True)
class Comparison:
    """A plan, and a step that was recorded."""

    plan: RankPlan
    timeline: Timeline

    @cached_property
    def prompt(self) -> Course:
        """Return the course of a step whose reductions end before the next gradient: a run holds no less."""
        return course_of(self.plan.budget, self.plan.events, prompt=True)

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield purpose, predicted bytes at least and at most, and measured bytes, of each purpose at its own peak."""
        late, prompt, measured = self.plan.course.most, self.prompt.most, self.timeline.most
        for name in (*PURPOSES, ACTIVATIONS):
            bounds = sorted((prompt.get(name, 0), late.get(name, 0)))
            if bounds[1] or measured.get(name):
                yield name, bounds[0], bounds[1], measured.get(name, 0)
        yield "all together", self.prompt.total, self.plan.peak, self.timeline.peak

    def beyond(self, least: int, most: int, measured: int) -> float:
        """Return how far `measured` lies outside of the predicted bounds, as a part of the nearer one."""
        nearest = min(max(measured, least), most)
        return (measured - nearest) / nearest if nearest else float(measured > 0)


def table(source: Source, comparison: Comparison, others: Sequence[Timeline]) -> str:
    """Format the comparison by purpose, and the peaks of other systems."""
    setting = comparison.plan.setting
    cells = [["MiB of rank 0, each at its peak", "predicted", "measured", "beyond"]]
    for name, least, most, measured in comparison.rows():
        beyond = comparison.beyond(least, most, measured)
        cells.append([name, _range(least, most), _mib(measured), f"{100 * beyond:+.2f} %" if beyond else "0 %"])
    cells += [[f"{other.system}, all together", "", _mib(other.peak), ""] for other in others]
    return f"{heading(source, setting)}\n{words(setting)}\n\n{_aligned(cells)}"


def heading(source: Source, setting: Setting) -> str:
    """Name the model, the ranks and the batch."""
    ranks = "1 rank" if setting.world_size == 1 else f"{setting.world_size} ranks"
    return f"{source.name} on {ranks}, {source.words}"


def _range(least: int, most: int) -> str:
    """Format two bounds. They differ where the time at which reductions end decides."""
    return _mib(most) if _mib(least) == _mib(most) else f"{_mib(least)} to {_mib(most)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
