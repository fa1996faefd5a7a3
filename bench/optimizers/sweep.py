"""Train with every optimizer of other libraries, on shards and in `WholeParameters`, and compare with plain training.

    python -m bench.optimizers --sweep torch timm pytorch_optimizer --ranks 2 3

A small model is trained for some steps at stages 3, 2 and 0. A plain twin has the same averaged gradients, and the same
class steps the twin's parameters. The rows go to `bench/results/optimizers-sweep.jsonl`, one JSON object per optimizer
and number of ranks, with an outcome for each stage:

| outcome | meaning |
|---|---|
| `same` | all weights have the bits of the twin |
| `refused` | an error of ShardLite on every rank, before anything has changed |
| `warned` | a `ShardWarning`: the optimizer draws random numbers, or could not be checked |
| `plain run fails` | the class does not train the twin, so there is nothing to compare |
| `constructor fails` | the class itself refuses shards when it is built |
| `same per block` | weights have the bits of a twin with an instance per block: the class computes matrices together |
| `differs` | weights differ, and nobody was told: a defect |
| `fails` | another error: a defect |
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.optimizers.libraries import Candidate, candidates
from shardlite import LayoutError, ShardLite, ShardWarning, WholeParameters
from shardlite.lab.memory.machine import machine
from shardlite.lab.table import RESULTS, Row, read_rows, write_rows
from shardlite.lab.verify.plain import Twin

STAGES = (3, 2, 0)
STEPS = 6
DEFECTS = ("differs", "fails")

Make = Callable[[list[Tensor]], Optimizer]


FILE = "optimizers-sweep.jsonl"


def run(libraries: Sequence[str], only: Sequence[str], group: dist.ProcessGroup, out: Path = RESULTS) -> bool:
    """Run the sweep as one of the ranks. On rank 0, add the rows to the file, and print them. Return if it has defects.

    Rows of other optimizers or numbers of ranks stay in the file.
    """
    rows: list[Row] = []
    for row in sweep(libraries, group, only):
        rows.append({"bench": "optimizers-sweep", **row, **machine()})
        if group.rank() == 0:
            told = (row[each] for each in ("ranks", "library", "optimizer", "shards", "whole"))
            print(*told, file=sys.stderr, flush=True)
            _keep(rows, out / FILE)
    if group.rank() == 0:
        print(f"{table(rows)}\n\n{counts(rows)}", flush=True)
    return any(outcome in DEFECTS for row in rows for where in ("shards", "whole") for outcome in row[where].values())


def _keep(rows: Sequence[Row], file: Path) -> None:
    """Add rows to a file, in place of earlier rows of the same optimizers and numbers of ranks."""
    new = {_key(row) for row in rows}
    others = [row for row in read_rows([file]) if _key(row) not in new] if file.exists() else []
    write_rows(sorted([*others, *rows], key=_key), file)


def _key(row: Row) -> tuple[str, str, int]:
    return row["library"], row["optimizer"], row["ranks"]


def sweep(libraries: Sequence[str], group: dist.ProcessGroup, only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for each optimizer. Collective."""
    for library in libraries:
        for candidate in candidates(library):
            if not only or candidate.name in only:
                yield try_all(candidate, group)


def try_all(candidate: Candidate, group: dist.ProcessGroup, stages: Sequence[int] = STAGES) -> Row:
    """Return the row of one optimizer. Collective."""
    kind, options = candidate.kind, candidate.options

    def plain(params: list[Tensor]) -> Optimizer:
        return kind(candidate.groups(params), **copy.deepcopy(options))

    def whole(params: list[Tensor]) -> Optimizer:
        return WholeParameters(candidate.groups(params), kind, **copy.deepcopy(options))

    row: Row = {"library": candidate.library, "optimizer": candidate.name, "class": kind.__name__}
    row |= {"ranks": group.size(), "options": {name: str(value) for name, value in options.items()}}
    for where, make in (("shards", plain), ("whole", whole)):
        found = {stage: _outcome(plain, make, stage, group) for stage in stages}
        row[where] = {str(stage): outcome for stage, (outcome, _) in found.items()}
        row[f"{where}_why"] = next((why for _, why in found.values() if why), "")
    return row


def net() -> nn.Module:
    """Return three blocks. In each, 2 or 3 ranks cut the second matrix. No cut is inside a vector's length."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, 16)) for _ in range(3)]
    return nn.Sequential(*blocks)


def _loss(model: Callable[..., Any], step: int, rank: int) -> Tensor:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = model(batch).sub(1).square().mean()
    return loss


def _kept(make: Make, made: list[Optimizer], params: list[Tensor]) -> Optimizer:
    made.append(make(params))
    return made[-1]


def _backward(model: Callable[..., Any], step: int, rank: int) -> None:
    _loss(model, step, rank).backward()


def _outcome(plain: Make, make: Make, stage: int, group: dist.ProcessGroup) -> tuple[str, str]:
    """Train a twin by `plain` and a wrapped model by `make`. Return the outcome, and the reason if there is one."""
    torch.manual_seed(1)
    quiet, eager = contextlib.redirect_stdout(io.StringIO()), torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(record=True) as said, quiet, eager:
        warnings.simplefilter("always")
        twin = Twin(net(), group.size(), None, group=group)
        model = ShardLite(net(), stage=stage, group=group, timeout=timedelta(seconds=60))
        try:
            theirs = plain(list(twin.masters.values()))
        except Exception as error:  # a foreign class may raise anything
            return "plain run fails", _brief(error)
        made: list[Optimizer] = []
        failed = _first_of_ranks(lambda: _train(model, twin, partial(_kept, make, made), theirs, group), group)
        told = next((str(each.message) for each in said if issubclass(each.category, ShardWarning)), "")
    if failed is not None:
        return failed
    weights = model.full_state_dict()
    same = all(torch.equal(weights[name], value) for name, value in twin.state_dict().items())
    if told:
        return "warned", told
    if same or not isinstance(made[-1], WholeParameters):
        return ("same", "") if same else ("differs", "")
    alike = _trained_per_block(plain, group)
    return ("same per block" if all(torch.equal(weights[name], alike[name]) for name in weights) else "differs"), ""


def _trained_per_block(plain: Make, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Train a plain twin with one instance of the class per block. Return its weights."""
    twin = Twin(net(), group.size(), None, group=group)
    blocks = dict.fromkeys(name.partition(".")[0] for name in twin.masters)
    optimizers = [
        plain([each for name, each in twin.masters.items() if name.startswith(f"{block}.")]) for block in blocks
    ]
    for step in range(STEPS):
        twin.backward(partial(_backward, twin, step, group.rank()))
        for each in optimizers:
            each.step()
            each.zero_grad()
    return dict(twin.state_dict())


def _train(model: ShardLite, twin: Twin, make: Make, theirs: Optimizer, group: dist.ProcessGroup) -> Any:
    """Train the twin and the wrapped model. After an error, return an outcome with its reason, else `None`."""
    built: list[Optimizer] = []
    if failed := _first_of_ranks(lambda: _build(make, model, built), group):
        return failed
    ours = built[0]
    for step in range(STEPS):
        twin.backward(partial(_backward, twin, step, group.rank()))
        _backward(model, step, group.rank())
        try:
            with torch.random.fork_rng(devices=[]):
                theirs.step()
        except Exception as error:
            return "plain run fails", _brief(error)
        if failed := _first_of_ranks(lambda: _step(ours), group):
            return failed
        ours.zero_grad()
        theirs.zero_grad()
    return None


def _build(make: Make, model: ShardLite, built: list[Optimizer]) -> Any:
    try:
        built.append(make(list(model.parameters())))
    except LayoutError as error:
        return "refused", _brief(error)
    except Exception as error:
        return "constructor fails", _brief(error)
    return None


def _step(optimizer: Optimizer) -> Any:
    try:
        optimizer.step()
    except LayoutError as error:
        return "refused", _brief(error)
    except Exception as error:
        return "fails", _brief(error)
    return None


def _first_of_ranks(run: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """Return the worst result of all ranks: a failure, then a refusal, then `None`. Collective."""
    try:
        own = run()
    except Exception as error:
        own = "fails", _brief(error)
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    refusal = next((each for each in found if each and each[0] == "refused"), None)
    if refusal is not None and None in found:  # the other ranks would wait for this one
        return "fails", f"on some ranks only: {refusal[1]}"
    worst = ("fails", "constructor fails", "refused", "plain run fails")
    return min(filter(None, found), key=lambda each: worst.index(each[0]), default=None)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


# ---- table ----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Return a markdown table: an optimizer per line, with the outcomes at all stages and numbers of ranks."""
    lines = ["| library | optimizer | on shards | in `WholeParameters` | reason |", "|---|---|---|---|---|"]
    names = dict.fromkeys((row["library"], row["optimizer"]) for row in rows)
    for library, name in names:
        own = [row for row in rows if (row["library"], row["optimizer"]) == (library, name)]
        cells = [_cell(own, where) for where in ("shards", "whole")]
        why = next((row[f"{where}_why"] for where in ("whole", "shards") for row in own if row[f"{where}_why"]), "")
        lines.append(f"| {library} | `{name}` | {cells[0]} | {cells[1]} | {_reason(why)} |")
    return "\n".join(lines)


def _cell(rows: Sequence[Row], where: str) -> str:
    """Return the outcome at stages 3 and 2, and those at stage 0 if they differ."""
    outcomes = {stage: sorted({row[where][stage] for row in rows}) for stage in rows[0][where]}
    sharded = sorted({each for stage, found in outcomes.items() if stage != "0" for each in found})
    zero = outcomes.get("0", sharded)
    return ", ".join(sharded) + ("" if zero == sharded else f" (stage 0: {', '.join(zero)})")


def _reason(why: str) -> str:
    """Shorten a reason to the clause that describes the cause."""
    text = why.partition(": ")[2] or why
    for start in ("because ", "by itself: ", "was not checked: "):
        text = text.partition(start)[2] or text
    return text.partition(". ")[0].replace("|", "\\|").rstrip(".")[:160]


def counts(rows: Sequence[Row]) -> str:
    """Return how many optimizers have each outcome, and the defects."""
    lines = []
    for where in ("shards", "whole"):
        of = {}
        for row in rows:
            key = row["library"], row["optimizer"]
            of.setdefault(key, set()).update(outcome for stage, outcome in row[where].items() if stage != "0")
        kinds = sorted({outcome for each in of.values() for outcome in each})
        lines.append(f"{where}: " + ", ".join(f"{kind} {sum(kind in each for each in of.values())}" for kind in kinds))
    bad = sorted(
        {
            f"{row['library']} {row['optimizer']} ({where}, {row['ranks']} ranks, stage {stage}): {outcome}"
            for row in rows
            for where in ("shards", "whole")
            for stage, outcome in row[where].items()
            if outcome in DEFECTS
        }
    )
    return "\n".join([*lines, *bad])
