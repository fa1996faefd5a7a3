"""Format tables of memory: rows of several systems, and one step by purpose next to its plan."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from shardlite.lab.memory.recorder import Row
from shardlite.lab.memory.timeline import PURPOSES, Timeline
from shardlite.lab.plan.report import words
from shardlite.lab.table import TABLES, aligned, cells_of, markdown_table
from shardlite.plan import ACTIVATIONS, RankPlan, Setting, Source

_MALLOC = {"returns": "malloc returns large blocks to the system", "default": "malloc with its defaults"}

_UNITS = {"KiB": 2**10, "MiB": 2**20}
_FEW = 10 * 2**20
"""A run whose rows all have fewer bytes in tensors is printed in KiB."""


def runs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield groups of rows that differ only in the system. In each group, systems that failed come last."""
    for _, run in groupby(rows, key=lambda row: (row["model"], row["ranks"], row.get("malloc"), row.get("busy"))):
        yield sorted(run, key=lambda row: "error" in row)


def model_stem(row: Row) -> str:
    """Return the name of a file for all rows of a model, without the extension: `footprint-gpt2`."""
    return "footprint-" + "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in row["model"])


def run_stem(row: Row) -> str:
    """Return the name of a file for the run of a row, without the extension: `footprint-gpt2-2ranks-busy`."""
    ways = ["default-malloc"] * (row.get("malloc") == "default") + ["busy"] * bool(row.get("busy"))
    return "-".join([model_stem(row), f"{row['ranks']}ranks", *ways])


def render(rows: Sequence[Row], table: Callable[[list[list[str]]], str] = aligned) -> str:
    """Return one table per run. `table` formats the cells of a run, by default as aligned text."""
    return "\n\n".join(_render_run(run, table) for run in runs(rows))


def as_markdown(rows: Sequence[Row]) -> str:
    """Return one table per run, in Markdown."""
    return render(rows, markdown_table)


def by_purpose(source: Source, plan: RankPlan, ours: Timeline, theirs: Timeline) -> str:
    """Format the plan of a step next to its recorded timeline `ours`, and the peak of FSDP2's timeline `theirs`."""
    unit = "KiB" if theirs.peak < _FEW else "MiB"
    size = partial(_in, unit, digits=2)
    rows = [[f"{unit} of rank 0, each at its peak", "predicted", "measured", "beyond"]]
    for name, least, most, measured in comparison(plan, ours):
        outside = beyond(least, most, measured)
        bounds = dict.fromkeys((size(least), size(most)))  # two bounds if the peak depends on when reductions end
        predicted = " to ".join(bounds)
        rows.append([name, predicted, size(measured), f"{100 * outside:+.2f} %" if outside else "0 %"])
    rows.append(["FSDP2, all together", "", size(theirs.peak), ""])
    return f"{heading(source, plan.setting)}\n{words(plan.setting)}\n\n{aligned(rows)}"


def comparison(plan: RankPlan, timeline: Timeline) -> Iterator[tuple[str, int, int, int]]:
    """For each purpose, yield its name and the bytes at its peak: least predicted, most predicted, and measured."""
    late, prompt, measured = plan.timeline.most, plan.prompt.most, timeline.most
    for name in (*PURPOSES, ACTIVATIONS):
        least, most = sorted((prompt.get(name, 0), late.get(name, 0)))
        if most or measured.get(name):
            yield name, least, most, measured.get(name, 0)
    yield "all together", plan.at_least, plan.peak, timeline.peak


def beyond(least: int, most: int, measured: int) -> float:
    """Return how far `measured` is outside the predicted bounds, as a fraction of the nearer bound."""
    nearest = min(max(measured, least), most)
    return (measured - nearest) / nearest if nearest else float(measured > 0)


def heading(source: Source, setting: Setting) -> str:
    """Return a line with the model, the number of ranks and the batch."""
    ranks = "1 rank" if setting.world_size == 1 else f"{setting.world_size} ranks"
    return f"{source.name} on {ranks}, {source.words}"


def _render_run(run: Sequence[Row], table: Callable[[list[list[str]]], str]) -> str:
    failures = [f"{row['system']} failed: {row['error'].splitlines()[0]}" for row in run if "error" in row]
    measured = [row for row in run if "error" not in row]
    if not measured:
        return "\n".join([f"{run[0]['model']}, {run[0]['ranks']} CPU ranks", *failures])
    unit = "KiB" if max(row["tensor_bytes"] for row in measured) < _FEW else "MiB"
    columns = {
        name.replace("%s", unit): each.replace("%s", unit) for name, each in TABLES["footprint"]["columns"].items()
    }
    cells = cells_of(columns, list(map(_with_ratio, measured)))
    return "\n\n".join([_heading(measured[0]), table(cells), *failures])


def _with_ratio(row: Row) -> Row:
    known = "predicted_bytes" in row
    return {**row, "measured_vs_predicted": row["tensor_bytes"] / row["predicted_bytes"] if known else None}


def _heading(row: Row) -> str:
    """Return a line with the facts that all rows of a run share."""
    busy = f", {row['busy']} busy loops at the same time" * bool(row["busy"])
    return (
        f"{row['words']} per rank, {row['parameters'] / 1e6:.1f}M parameters; {row['ranks']} CPU ranks{busy}; "
        f"{_MALLOC[row['malloc']]}; {row['machine']}, torch {row['torch']}, {row['date']}."
    )


def _in(unit: str, nbytes: int, digits: int = 0) -> str:
    return f"{nbytes / _UNITS[unit]:.{digits}f}"
