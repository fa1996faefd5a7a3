"""A cost model of schedules on links, and the algorithm and chunk that it predicts to be fastest.

    plan = schedule.reduce_scatter("ring", world_size=8)
    time(plan, nbytes, chunk, LINKS["p2p"])                 seconds
    seconds("all-gather", "ring", nbytes, 4096, link)       the same by formula, where there is one
    best_chunk(plan, nbytes, LINKS["p2p"])                  bytes per message
    best_algorithm(nbytes, 8, LINKS["shared_memory"])       "direct"

These functions measure nothing: their results depend on sizes, the number of ranks and the given constants only, so
equal arguments give equal results on all ranks. `nbytes` is always the whole buffer, of which each rank has a segment.

The model is that of Hockney (1994, Parallel Computing 20) with a term for additions, and with the work per message kept
apart from its latency as in LogP (Culler et al., 1993): four numbers per link. A schedule is simulated with them: a
message starts when its content is complete at the source, its sender sends nothing else and its target receives
nothing else. The times of `W` ranks with one message per piece then are (`M` bytes, Thakur, Rabenseifner, Gropp, 2005,
IJHPCA 19)

                      ring                                            direct
    all-gather        (W-1) (alpha + overhead) + (W-1)/W M beta       alpha + (W-1) overhead + (W-1)/W M beta
    reduce-scatter    the same, and (W-1)/W M gamma                   the same, and (W-1)/W M gamma

where additions do not overlap. Where they do, an addition runs while the next message is received: `direct` then takes
the slower of both, and so does a ring whose pieces are cut into chunks, of which each costs another `overhead`.

Not in the model: ranks that share a processor, links that share a wire, and caches.

Legend: `W` ranks, `M` bytes in the whole buffer.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple, get_args

from shardlite.comm import schedule
from shardlite.comm.schedule import IN_RING_ORDER
from shardlite.comm.transfers import Schedule
from shardlite.config import ALGORITHMS, Algorithm
from shardlite.errors import LayoutError

Operation = Literal["all-gather", "reduce-scatter"]

LEAST_CHUNK = 64 << 10
"""Bytes below which a piece is not cut: the message would cost more than it saves."""

_MOST_SIMULATED = 64  # ranks, to compare algorithms: a simulation of W ranks takes W^2 steps
_MOST_CHUNKS = 64  # per piece; more of them save less than a hundredth of an addition
_WORTH = 0.99  # twice as many messages must reduce the time by at least this factor
_EQUAL = 1 + 1e-9  # times that differ by rounding only


class LinkCost(NamedTuple):
    """Costs of messages between two ranks, in seconds. All pairs of ranks are linked alike."""

    alpha: float
    """Latency of a step: from when a message could be sent until it can be received, without work on either side."""

    beta: float
    """Per byte transferred. A rank sends one message at a time, and receives one at a time."""

    gamma: float
    """Per byte of a message that is added to another."""

    overhead: float = 0.0
    """Per message: work during which its sender cannot send and its target cannot receive another one."""

    overlaps: bool = True
    """Whether a rank adds while it receives. If not, one processor does both."""


LINKS: Mapping[str, LinkCost] = {
    "shared_memory": LinkCost(alpha=15e-6, beta=0.13e-9, gamma=0.02e-9, overhead=155e-6, overlaps=False),
    "p2p": LinkCost(alpha=0.0, beta=0.48e-9, gamma=0.20e-9, overhead=280e-6, overlaps=False),
}
"""Links between CPU ranks, by the name of the transport.

Fitted by `bench/ring/fit.py` to the processor time of 4 ranks on 2 cores of an AMD EPYC, which other programs hardly
change: rows `"ring-fit"` of `cpu_ms_p50` in `bench/results/ring-cpu.jsonl`. Over gloo a step of several messages was no
faster than as many steps, so all latency is in `overhead`, and `ring` and `direct` take the same time by the model.
"""


def time(plan: Schedule, nbytes: int, chunk: int, link: LinkCost) -> float:
    """Return the seconds until the last rank has finished a buffer of `nbytes`, in messages of up to `chunk` bytes.

    All segments are assumed to have equal length. Messages use a link, and a rank, in the order of the schedule.
    """
    sizes = _sizes(plan, nbytes, chunk)
    adds = plan.operation == "reduce-scatter"
    at_start = [0.0] * len(sizes)
    sending, receiving, adding = ([0.0] * plan.world_size for _ in range(3))  # until when each rank is busy
    complete: dict[tuple[int, int, int], list[float]] = {}  # by rank, segment, part: when its messages are complete
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


def seconds(operation: Operation, algorithm: Algorithm, nbytes: int, world_size: int, link: LinkCost) -> float:
    """Return `time` of `ring` or `direct` with one message per piece, by formula, for any number of ranks.

    Raises:
        LayoutError: another algorithm, which has no formula here.
    """
    if algorithm not in IN_RING_ORDER:
        raise LayoutError(f"{algorithm!r} has no formula: there are those of {', '.join(sorted(IN_RING_ORDER))}")
    messages, piece = world_size - 1, -(-nbytes // world_size)
    if messages == 0:
        return 0.0
    moved, added = link.overhead + piece * link.beta, piece * link.gamma * (operation == "reduce-scatter")
    if algorithm == "ring":
        return messages * (link.alpha + moved + added)
    if link.overlaps:
        return link.alpha + max(moved + messages * added, messages * moved + added)
    return link.alpha + messages * (moved + added)


def best_chunk(plan: Schedule, nbytes: int, link: LinkCost, *, most: int | None = None) -> int:
    """Return the bytes per message with which a schedule is fastest: a whole piece, or a piece halved several times.

    Twice as many messages must save at least a hundredth of the time. No message is shorter than `LEAST_CHUNK`, unless
    the piece is, or longer than `most`, which bounds the staging of a reduction. Chunks must be equal on all ranks, so
    all ranks must pass the same numbers.

    If additions do not overlap, `ring` and `direct` keep their links busy with whole pieces. Then nothing is simulated,
    which would take W^2 steps.
    """
    if not link.overlaps and plan.algorithm in IN_RING_ORDER:
        return _longest_chunk(plan, nbytes, most)
    return _best_chunk(plan, nbytes, link, most)[0]


@cache
def best_algorithm(nbytes: int, world_size: int, link: LinkCost) -> Algorithm:
    """Return the algorithm of `IN_RING_ORDER` that takes the least time to gather and to reduce a buffer of `nbytes`.

    These give the same bits, so the choice changes no result. Worlds of more than 64 ranks are taken for one of 64. Of
    equally fast algorithms the first in the order of `config.ALGORITHMS` is returned.

    Raises:
        LayoutError: no ranks.
    """
    simulated = min(world_size, _MOST_SIMULATED)

    def seconds(algorithm: Algorithm) -> float:
        plans = [plan_of(operation, algorithm, simulated) for operation in get_args(Operation)]
        return sum(_best_chunk(plan, nbytes, link)[1] for plan in plans)

    taken = {algorithm: seconds(algorithm) for algorithm in ALGORITHMS if algorithm in IN_RING_ORDER}
    least = min(taken.values())
    return next(algorithm for algorithm, total in taken.items() if total <= least * _EQUAL)


def plan_of(operation: Operation, algorithm: Algorithm, world_size: int, node: int = 1) -> Schedule:
    """Return the schedule of an operation."""
    make = schedule.all_gather if operation == "all-gather" else schedule.reduce_scatter
    return make(algorithm, world_size, node=node if algorithm == "hierarchical" else 1)


def _sizes(plan: Schedule, nbytes: int, chunk: int) -> list[int]:
    """Return the bytes of each message of the longest piece."""
    rest = _piece(plan, nbytes)
    sizes = []
    while rest > 0:
        sizes.append(min(rest, max(1, chunk)))
        rest -= sizes[-1]
    return sizes


def _piece(plan: Schedule, nbytes: int) -> int:
    return -(-nbytes // (plan.segments * plan.parts))


def _longest_chunk(plan: Schedule, nbytes: int, most: int | None) -> int:
    """Return the bytes of a message if a piece is cut into the fewest messages of equal length."""
    piece = max(1, _piece(plan, nbytes))
    return piece if most is None else -(-piece // -(-piece // max(1, most)))


def _best_chunk(plan: Schedule, nbytes: int, link: LinkCost, most: int | None = None) -> tuple[int, float]:
    """Return the best chunk and its time. More chunks first save time, then cost it: the search ends at the minimum."""
    piece, best = max(1, _piece(plan, nbytes)), _longest_chunk(plan, nbytes, most)
    count = -(-piece // best)
    shortest = time(plan, nbytes, best, link)
    while 2 * count <= _MOST_CHUNKS and (chunk := -(-piece // (2 * count))) >= LEAST_CHUNK:
        seconds = time(plan, nbytes, chunk, link)
        if seconds >= _WORTH * shortest:
            break
        best, shortest, count = chunk, seconds, 2 * count
    return best, shortest
