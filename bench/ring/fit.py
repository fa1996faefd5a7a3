"""Fit the link of the cost model to measured times by least squares.

The model simulates a schedule: a message starts as soon as its content is complete at the sender, the sender has no
other message to send, and the receiver has no other message to receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from shardlite.comm.schedule import all_gather, reduce_scatter
from shardlite.comm.transfers import Schedule
from shardlite.config import Algorithm
from shardlite.plan import LinkCost, Operation

_COSTS = ("alpha", "beta", "gamma", "overhead")
_ROUNDS = 20


def fit(rows: Sequence[Mapping[str, Any]], *, key: str = "ms_p50", overlaps: bool | None = None) -> LinkCost:
    """Return the link whose predictions have the least squared relative error. Its costs are not negative.

    A row has `operation` (one of `Operation`, or `"all-reduce"`), `algorithm`, `ranks`, `nbytes`, `chunk_bytes`, and
    milliseconds under `key`. A row of an all-reduce also has `messages`, the number of messages that a rank sends.
    This number is `W-1` if the all-reduce has a single round.

    As long as the critical path has the same messages, times are linear in the four costs. So a few rounds of linear
    fits suffice. Costs that cannot be separated are combined into one number: separating `alpha` and `overhead`
    requires a schedule with several messages per step, or different numbers of chunks. If `overlaps` is `None`, both
    values are tried.

    Raises:
        ValueError: If there are no rows.
    """
    if not rows:
        raise ValueError("cannot fit a link: there are no rows")
    measured = [(row, float(row[key]) / 1e3) for row in rows]
    found = [_fit(measured, how) for how in ((False, True) if overlaps is None else (overlaps,))]
    return min(found, key=lambda link: sum((predicted(row, link) / seconds - 1) ** 2 for row, seconds in measured))


def predicted(row: Mapping[str, Any], link: LinkCost) -> float:
    """Return the seconds that the model predicts for a row, which has the same keys as the rows of `fit`."""
    return sum(time(plan, nbytes, row["chunk_bytes"], link) for plan, nbytes in _plans(row))


def plan_of(operation: Operation, algorithm: Algorithm, world_size: int, node: int = 1) -> Schedule:
    """Return the schedule of an operation."""
    make = all_gather if operation == "all-gather" else reduce_scatter
    return make(algorithm, world_size, node=node if algorithm == "hierarchical" else 1)


def time(plan: Schedule, nbytes: int, chunk: int, link: LinkCost) -> float:
    """Return the seconds until all ranks have finished a buffer of `nbytes`, in messages of up to `chunk` bytes.

    All segments are assumed to have equal length. Messages use links and ranks in the order of the schedule.
    """
    sizes = _sizes(plan, nbytes, chunk)
    adds = plan.operation == "reduce-scatter"
    at_start = [0.0] * len(sizes)
    sending, receiving, adding = ([0.0] * plan.world_size for _ in range(3))  # time until which each rank is busy
    complete: dict[tuple[int, int, int], list[float]] = {}  # times of completion, by rank, segment and part
    for transfers in plan.steps:
        came: dict[tuple[int, int, int], list[float]] = {}
        for each in transfers:
            source, target = each.source, each.target
            ready = complete.get((source, each.segment, each.part), at_start)
            done = came.setdefault((target, each.segment, each.part), list(at_start))
            for i, size in enumerate(sizes):
                end = max(ready[i] + link.alpha, sending[source], receiving[target]) + link.overhead + size * link.beta
                sending[source] = receiving[target] = end
                if adds:
                    end = adding[target] = max(end, adding[target]) + size * link.gamma
                    if not link.overlaps:
                        receiving[target] = end
                done[i] = max(done[i], end)
        complete.update(came)
    return max((moment for done in complete.values() for moment in done), default=0.0)


def _sizes(plan: Schedule, nbytes: int, chunk: int) -> list[int]:
    """Return the bytes of each message of the longest piece."""
    piece = -(-nbytes // (plan.segments * plan.parts))
    return [min(piece - start, chunk) for start in range(0, piece, max(1, chunk))]


def _plans(row: Mapping[str, Any]) -> Iterator[tuple[Schedule, int]]:
    """Yield the schedules of an operation, each with the bytes of its full buffer."""
    ranks, nbytes = row["ranks"], row["nbytes"]
    if row["operation"] == "all-reduce" and row.get("messages") == ranks - 1:
        # In a single round, every rank sends the whole short buffer to all other ranks.
        yield plan_of("all-gather", "direct", ranks), ranks * nbytes
        return
    operations: dict[str, tuple[Operation, ...]] = {"all-reduce": ("reduce-scatter", "all-gather")}
    for operation in operations.get(row["operation"], (row["operation"],)):
        yield plan_of(operation, row["algorithm"], ranks, row.get("node", 1)), nbytes


def _fit(measured: Sequence[tuple[Mapping[str, Any], float]], overlaps: bool) -> LinkCost:
    link = LinkCost(1e-4, 1e-9, 1e-10, 1e-5, overlaps)
    for _ in range(_ROUNDS):
        costs = _least_squares([[share / seconds for share in _shares(row, link)] for row, seconds in measured])
        fitted = LinkCost(**dict(zip(_COSTS, costs, strict=True)), overlaps=overlaps)
        if fitted == link:
            break
        link = fitted
    return link


def _shares(row: Mapping[str, Any], link: LinkCost) -> list[float]:
    """Return the derivatives of a row's time with respect to the costs. The time is linear in the costs."""
    now = predicted(row, link)
    shares = []
    for name in _COSTS:
        step = 1e-7 * now / (row["nbytes"] if name in ("beta", "gamma") else row["ranks"])
        more = predicted(row, link._replace(**{name: getattr(link, name) + step}))
        shares.append((more - now) / step)
    return shares


def _least_squares(terms: Sequence[Sequence[float]]) -> list[float]:
    """Return nonnegative costs for which the products with all rows of `terms` are closest to 1.

    Each set of nonzero costs is tried, small sets first, so costs without effect stay zero.
    """
    table = np.array(terms)
    best, least = np.zeros(table.shape[1]), float(len(table))
    for count in range(1, len(best) + 1):
        for used in map(list, combinations(range(len(best)), count)):
            costs = np.zeros_like(best)
            costs[used] = _solve(table[:, used])
            error = float(((table @ costs - 1) ** 2).sum())
            if costs.min() >= 0 and error < least * (1 - 1e-6) - 1e-12:
                best, least = costs, error
    found: list[float] = best.tolist()
    return found


def _solve(table: np.ndarray) -> np.ndarray:
    """Return the least-squares solution of `table @ x = 1`, or NaN if it is not unique."""
    scale = np.linalg.norm(table, axis=0)
    if not scale.all():
        return scale * np.nan
    solution, _, rank, _ = np.linalg.lstsq(table / scale, np.ones(len(table)), rcond=3e-5)
    return np.asarray(solution / scale if rank == len(scale) else scale * np.nan)
