"""Schedules executed symbolically: buffers are dicts, and a sum is the order of its additions.

`by_steps` is the meaning of a schedule: all ranks do a step together. `Race` has the ranks run by themselves, chunk by
chunk, over links with few slots, in an order drawn by chance. Both refuse what a real run would answer with wrong
numbers, and `Race` finds out when all wait for each other.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from random import Random

import pytest

from shardlite.comm.schedule import ALGORITHMS, Order, all_gather, reduce_scatter
from shardlite.comm.transfers import Program, Schedule

Piece = tuple[int, int]  # segment, part
Chunk = tuple[int, int, int]  # segment, part, and a number
Held = list[dict]  # of each rank: what it holds of each piece or chunk


MAKERS = {"all-gather": all_gather, "reduce-scatter": reduce_scatter}


def nodes(algorithm, world_size):
    """Return the sizes of nodes to try; none if there is no such schedule."""
    if algorithm == "halving" and world_size.bit_count() != 1:
        return []
    return [g for g in range(1, world_size + 1) if world_size % g == 0] if algorithm == "hierarchical" else [1]


def cases(*world_sizes):
    """Yield every schedule of these world sizes but broadcasts, with its node size."""
    for operation, make in MAKERS.items():
        for algorithm in ALGORITHMS:
            for world_size in world_sizes:
                for node in nodes(algorithm, world_size):
                    yield (
                        pytest.param(
                            operation, algorithm, world_size, node, id=f"{operation}-{algorithm}-{world_size}-{node}"
                        ),
                        make(algorithm, world_size, node=node),
                    )


def every(*world_sizes):
    """Run a test with every schedule of these world sizes, as `(operation, algorithm, world_size, node)`."""
    return pytest.mark.parametrize(
        ("operation", "algorithm", "world_size", "node"), [param for param, _ in cases(*world_sizes)]
    )


class WrongError(Exception):
    """The schedule is wrong, and this is where it shows."""


def add(parcels: list[Order]) -> Order:
    """Add from left to right."""
    return reduce(lambda first, second: (first, second), parcels)


def leaves(order: Order) -> list[int]:
    """Return the ranks in a sum, in the order in which they stand there."""
    return [order] if isinstance(order, int) else leaves(order[0]) + leaves(order[1])


def start(schedule: Schedule, rank: int, chunks: int | None = None) -> dict:
    """Return what `rank` holds at the beginning: its own rank as the value, of its pieces or their chunks."""
    if schedule.operation == "reduce-scatter":
        segments = range(schedule.segments)
    elif schedule.operation == "broadcast":
        segments = range(1) if not any(each.target == rank for step in schedule.steps for each in step) else range(0)
    else:
        segments = range(rank, rank + 1)
    pieces = [(segment, part) for segment in segments for part in range(schedule.parts)]
    if chunks is None:
        return dict.fromkeys(pieces, rank)
    return {(*piece, chunk): rank for piece in pieces for chunk in range(chunks)}


def check_end(schedule: Schedule, held: Held) -> None:
    """Check that each rank has all segments, or of its own one a sum in which each rank is once."""
    world = list(range(schedule.world_size))
    parts = range(schedule.parts)
    for rank in world:
        if schedule.operation == "reduce-scatter":
            own = {place: order for place, order in held[rank].items() if place[0] == rank}
            if {place[1] for place in own} != set(parts) or any(
                sorted(leaves(order)) != world for order in own.values()
            ):
                raise WrongError(f"rank {rank} ends with the sums {own}")
        else:
            got = {place[:2] for place in held[rank]}
            if got != {(segment, part) for segment in range(schedule.segments) for part in parts}:
                raise WrongError(f"rank {rank} ends with the pieces {sorted(got)} only")
            for place, owner in held[rank].items():
                if schedule.operation == "all-gather" and owner != place[0]:
                    raise WrongError(f"rank {rank} has rank {owner}'s {place}")


def by_steps(schedule: Schedule) -> Held:
    """Carry the schedule out, all ranks in step, check it, and return what each ends with."""
    adds = schedule.operation == "reduce-scatter"
    held = [start(schedule, rank) for rank in range(schedule.world_size)]
    for t, transfers in enumerate(schedule.steps):
        coming: dict[tuple[int, Piece], list[Order]] = {}
        for each in transfers:
            piece = each.segment, each.part
            if piece not in held[each.source] or each.source == each.target:
                raise WrongError(f"step {t}: rank {each.source} sends {piece} to {each.target}, and cannot")
            coming.setdefault((each.target, piece), []).append(held[each.source][piece])
        if adds:  # a part of a sum that has been sent belongs to another rank now
            for each in transfers:
                held[each.source].pop((each.segment, each.part), None)
        for (rank, piece), parcels in coming.items():
            if adds != (piece in held[rank]) or (len(parcels) > 1 and not adds):
                raise WrongError(f"step {t}: {piece} comes to rank {rank}, which has sent it on or has it")
            held[rank][piece] = (add(parcels), held[rank][piece]) if adds else parcels[0]
    check_end(schedule, held)
    return held


@dataclass(frozen=True)
class Send:
    """Give a chunk to the link to `target`."""

    target: int
    chunk: Chunk


@dataclass(frozen=True)
class Take:
    """Take a chunk from the link from `source`; with the last parcel, what has come is added up."""

    source: int
    chunk: Chunk
    last: bool


def in_order_of_arrival(program: Program, chunks: int) -> Iterator[Send | Take]:
    """What a rank does that sends at once what it can, and passes a chunk on as soon as it is there."""
    for each in program.departures:
        for chunk in range(chunks):
            for target in each.targets:
                yield Send(target, (each.segment, each.part, chunk))
    for each in program.arrivals:
        for chunk in range(chunks):
            place = each.segment, each.part, chunk
            for i, source in enumerate(each.sources, start=1):
                yield Take(source, place, i == len(each.sources))
            for target in each.targets:
                yield Send(target, place)


@dataclass
class Link:
    """From one rank to another: a queue at the sender, and slots at the receiver."""

    slots: list[tuple[Chunk, Order] | None]
    queue: deque[tuple[Chunk, Order]] = field(default_factory=deque)
    written: int = 0
    read: int = 0

    @property
    def has_free_slot(self) -> bool:
        return self.written - self.read < len(self.slots)

    def write(self, chunk: Chunk, value: Order) -> None:
        place = self.written % len(self.slots)
        if self.slots[place] is not None:
            raise WrongError(f"{chunk} overwrites {self.slots[place]}, which was not read yet")
        self.slots[place] = chunk, value
        self.written += 1

    def take(self) -> tuple[Chunk, Order]:
        place = self.read % len(self.slots)
        message = self.slots[place]
        assert message is not None, "no message"
        self.slots[place] = None
        self.read += 1
        return message


class Race:
    """Ranks and links that move in an order drawn by chance.

    A send is queued as a reference to the rank's buffer, which must not change before the link reads it.
    """

    def __init__(self, schedule: Schedule, *, chunks: int, slots: int, seed: int) -> None:
        world = range(schedule.world_size)
        self.schedule, self.slots = schedule, slots
        self.adds = schedule.operation == "reduce-scatter"
        self.random = Random(seed)
        self.held: Held = [start(schedule, rank, chunks) for rank in world]
        self.parcels: list[dict[Chunk, list[Order]]] = [{} for _ in world]
        self.links: dict[tuple[int, int], Link] = {}
        self.todo = [deque(in_order_of_arrival(schedule.program(r), chunks)) for r in world]

    def run(self) -> Held:
        """Move ranks until none can, check the end, and return what each rank has then."""
        awake: list[int | tuple[int, int]] = list(range(self.schedule.world_size))  # ranks, and links by their ends
        known = set(awake)
        while awake:
            place = int(self.random.random() * len(awake))
            awake[place], awake[-1] = awake[-1], awake[place]
            mover = awake.pop()
            known.remove(mover)
            moved = self._act(mover) if isinstance(mover, int) else self._carry(mover)
            awake += [other for other in moved if other not in known]
            known.update(moved)
        waiting = {rank: self.todo[rank][0] for rank in range(self.schedule.world_size) if self.todo[rank]}
        if waiting:
            raise WrongError(f"all ranks wait: {waiting}")
        if any(link.queue or link.written != link.read for link in self.links.values()):
            raise WrongError("something was sent that no rank took")
        check_end(self.schedule, self.held)
        return self.held

    def _link(self, source: int, target: int) -> Link:
        return self.links.setdefault((source, target), Link([None] * self.slots))

    def _act(self, rank: int) -> list:
        """Let `rank` do the next thing that it has to do, if it can; return who may move then."""
        if not self.todo[rank]:
            return []
        task = self.todo[rank][0]
        ends = (rank, task.target) if isinstance(task, Send) else (task.source, rank)
        link = self._link(*ends)
        if isinstance(task, Take):
            if link.written == link.read:
                return []
            self._receive(rank, task, *link.take())
        else:
            if task.chunk not in self.held[rank] or task.target == rank:
                raise WrongError(f"rank {rank} sends {task.chunk} to {task.target}, and cannot")
            link.queue.append((task.chunk, self.held[rank][task.chunk]))
        self.todo[rank].popleft()
        return [*ends, ends]

    def _carry(self, ends: tuple[int, int]) -> list:
        """Let a link bring the first message of its queue to a slot, if one is free."""
        link = self.links[ends]
        if not (link.queue and link.has_free_slot):
            return []
        chunk, value = link.queue.popleft()
        if self.held[ends[0]].get(chunk) != value:
            raise WrongError(f"rank {ends[0]} changed {chunk} before it was sent to {ends[1]}")
        link.write(chunk, value)
        return [*ends, ends]

    def _receive(self, rank: int, task: Take, chunk: Chunk, value: Order) -> None:
        if chunk != task.chunk:
            raise WrongError(f"rank {rank} takes {chunk} from {task.source} for {task.chunk}")
        held = self.held[rank]
        parcels = self.parcels[rank].setdefault(chunk, [])
        if self.adds != (chunk in held) or (parcels and not self.adds):
            raise WrongError(f"{chunk} comes to rank {rank}, which has it already or has no part in it")
        parcels.append(value)
        if task.last:
            del self.parcels[rank][chunk]
            held[chunk] = (add(parcels), held[chunk]) if self.adds else value
