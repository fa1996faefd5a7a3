"""Which unit is gathered when (stage 3), so that all ranks gather the same units whatever each of them needs.

Ranks whose forwards take different branches need different units. All ranks gather the units of a recorded order
(`gather_order.py`), each pass after the other, whether they need them or not. A rank that needs another unit goes
through that order first, then negotiates. A rank at the end of its pass serves the others until all are there, while
its own program goes on.

In a round of the negotiation every rank says which unit it wants to gather next, or that its pass is over. All ranks
then gather one of the wanted units, the first in the order of registration (in a backward the last). Ranks that wanted
it go on, the others negotiate again. The pass is over when it is over for all.

    round   rank 0 wants   rank 1 wants   gathered by both
    1       blocks.0       blocks.2       blocks.0
    2       blocks.1       blocks.2       blocks.1
    3       blocks.2       blocks.2       blocks.2
    4       (end)          (end)

The messages are a few integers on the host, whatever device the weights are on. A unit that this rank only takes part
in is gathered to memory of its own, which is freed at once: it costs the unit's bytes on the wire and, for its
duration, in memory. `traffic()` counts it under `take part`.

A step in which all ranks do the same waits for no negotiation, but for one that a backward on a GPU collects: the round
of its forward, which tells whether streams may wait for reductions. What belongs to the recorded order is gathered on
one queue, where nothing else stands between. Rounds, and the gathers that come of them, have a thread of their own:

    program       forward | gathers of its order | loss | gathers of the backward | flags | step | next forward
    negotiation           |-- end of the forward ------------------------- collected before that -|
                                                        |-- end of the backward --- before the next one -|

So a rank that is ahead has started gathers of the next pass while another one asks for a unit in this one. These do not
get into each other's way: what was negotiated is sent through the memory of the hosts, by messages with names, and is
behind what the program had computed when the pass began, not what it computes now. One round per pass remains, because
no rank can tell whether another is going to ask. It is collected when the next pass of the kind begins, which has to
know the order that came of it; by then all ranks have long ended the first one, if none is a step behind.

Weights must not change while another rank may ask for them. After a backward this takes no wait for its round: a rank
sends its gradient flags behind the end of its pass, so what follows them, like the step, follows the end of all ranks'
passes, on the stream as well as on the host. Other changes wait for the round.

The first pass of a kind has no order yet. All its gathers are negotiated, on the queue of the others, and are over
before another pass begins.

A pass that a CUDA graph captures is replayed without the hosts, so there is no round: it has to need what the recorded
order has, on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import NoReturn
from zlib import crc32

import torch

from shardlite.comm import Context, Moment, Work, all_gather, are_equal
from shardlite.errors import SAME_PASSES, CommError, DesyncError, PhaseError
from shardlite.params import Unit
from shardlite.weights.all_gather import GatherQueue
from shardlite.weights.gather_order import GatherOrder

END = -1
"""Wanted by a rank whose pass is over."""


@dataclass(frozen=True)
class Proposal:
    """What a rank says in a round."""

    wants: int
    """The unit that it wants to gather next, by its index, or `END`."""

    kind: int
    """A checksum of the kind of its pass."""

    step: int
    """How many steps it has taken."""

    needed: int
    """At the end of its pass: how many gathers it has needed."""

    uses: int
    """At the end of its pass: a checksum of the units that it has used, in their order."""


class Negotiation:
    """Negotiates gathers of one wrapped model with the ranks that share it, one round after the other."""

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        self._context = context
        self._names = names

    def agree(self, wants: int, during: "Pass", needed: int = 0) -> "Round":
        """Take part in one round. The pass chooses among what is wanted.

        Raises:
            DesyncError: ranks are in different passes, or have taken different numbers of steps.
            CommError: a peer failed or is late.
        """
        kind = during.kind
        uses = during.uses if wants == END else []
        mine = Proposal(wants, _checksum(kind), during.step, needed, _checksum(str(uses)))
        here = f"{self._wish(mine, kind)}, at step {mine.step}"
        if self._all_say(mine, here):
            return Round(wants, [needed] * self._context.transport.world_size, alike=True)
        rows = self._exchange(astuple(mine), "the next gather", here)
        wishes, kinds, steps, needs, used = (list(column) for column in zip(*rows, strict=True))
        if {*kinds} != {mine.kind} or {*steps} != {mine.step}:
            self._compare([Proposal(*row) for row in rows], kind)
        wanted = sorted({*wishes} - {END})
        return Round(during.prefer(wanted) if wanted else END, needs, alike=len({*used}) == 1)

    def lists(self, mine: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Return the list of every rank; `lengths` are theirs."""
        padded = [*mine, *[0] * (max(lengths) - len(mine))]
        rows = self._exchange(padded, "the gathers of a pass", "its end") if padded else [[] for _ in lengths]
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _all_say(self, mine: Proposal, during: str) -> bool:
        """Return whether all ranks are known to say the same: where they are many, it takes less to find out."""
        rounds = self._context.rounds
        if rounds is None:
            return False
        operation = self._context.operation(
            "negotiation of the next gather, whether all say the same",
            "order negotiation",
            at_any_step=True,
            during=during,
        )
        self._context.progress.joins()
        return are_equal(astuple(mine), rounds, operation=operation)

    def _exchange(self, mine: Sequence[int], what: str, during: str) -> list[list[int]]:
        hosts, _ = self._context.hosts
        full = torch.zeros(hosts.world_size, len(mine), dtype=torch.int32)
        full[hosts.rank] = torch.tensor(mine, dtype=torch.int32)
        # The name says nothing of the step: ranks that differ in it are to meet here, and to be told apart.
        operation = self._context.operation(
            f"negotiation of {what}", "order negotiation", at_any_step=True, during=during
        )
        self._context.progress.joins()
        all_gather(full.view(-1), hosts, operation=operation)
        rows: list[list[int]] = full.tolist()
        return rows

    def _compare(self, words: Sequence[Proposal], kind: str) -> None:
        mine = words[self._context.transport.rank]
        here = f"rank {self._context.transport.rank}, in {self._wish(mine, kind)},"
        for rank, theirs in enumerate(words):
            if theirs.step != mine.step:
                self._fail(
                    mine,
                    kind,
                    f"{here} has taken {mine.step} steps, but rank {rank} has taken {theirs.step}: a rank has left "
                    f"one out. {SAME_PASSES}",
                )
            if theirs.kind != mine.kind:
                self._fail(
                    mine,
                    kind,
                    f"{here} at step {mine.step}, meets rank {rank} in {self._wish(theirs, 'another pass')}. All ranks "
                    "must call the same modules, in one mode (train or eval, with or without gradients). "
                    f"{SAME_PASSES}",
                )

    def _fail(self, mine: Proposal, kind: str, why: str) -> NoReturn:
        """Raise, with what the others are doing, and where in the program; each finds the same difference now.

        The program may wait in another operation.
        """
        reports = self._context.reports
        others = reports.compare(f"{self._wish(mine, kind)}, at step {mine.step}", why)
        reports.verdict = DesyncError(f"{why}{others}")
        raise reports.verdict

    def _wish(self, word: Proposal, kind: str) -> str:
        return f"the end of {kind}" if word.wants == END else f"{kind}, for unit {self._names[word.wants]!r}"


@dataclass(frozen=True)
class Round:
    """What a round came to."""

    choice: int
    """The unit that all gather now, or `END`."""

    needed: Sequence[int]
    """How many gathers each rank has needed so far."""

    alike: bool
    """At the end of a pass: whether all ranks have used the same units in the same order."""


@dataclass
class Pass:
    """One pass as the queues see it. Its end may still be running when later passes begin."""

    kind: str
    step: int
    """How many steps the rank had taken when it began."""

    prefer: Callable[[Sequence[int]], int]
    """Chooses among the units that ranks want."""

    lane: GatherQueue
    """Where rounds run, and gathers that are not in the gather order."""

    began: Moment | None
    """The program's computation before it, in which the weights became what they are."""

    beyond: bool = False
    """Whether any rank has needed more than the gather order has."""

    uses: list[int] = field(default_factory=list)
    """The units that this rank has used, in their order."""

    strayed: bool = True
    """Whether ranks have used different units, or more than the gather order has, as far as is known."""

    confirmed: bool = False
    """Whether the program is behind its end on all ranks in any case."""

    ending: Work | None = None
    revise: Callable[[], None] = lambda: None
    """Revise the gather order by what all ranks have exchanged at the end."""


class PassCoordinator:
    """Decides for one wrapped model which unit all ranks gather when. One pass at a time."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._units = units
        self._single_rank = context.transport.world_size == 1
        self._owner = context.owner
        self._progress = context.progress
        self._reports = context.reports
        self._version = context.version
        self._streams = context.streams
        self._queue = GatherQueue(context)
        self._beside = GatherQueue(context, beside=True)
        self._gather_order = GatherOrder()
        self._negotiation = Negotiation(context, [unit.name for unit in units])
        self._now: Pass | None = None
        self._ended: list[Pass] = []  # until they are collected
        self.strayed = False
        """Whether ranks have parted in a pass since this was set to false."""

        self._failed = False

    def begin(self, kind: str, *, backwards: bool = False) -> None:
        """Start a pass. Those of one kind are expected to need the same units.

        Where ranks need different ones, those registered first come first or, `backwards`, last.

        Raises:
            CommError: the last pass of the kind could not be ended: a peer failed, is late, or does something else.
        """
        self.end()  # of one that an interrupt left
        self._reports.raise_verdict()
        lane = self._beside if self._gather_order.knows(kind) else self._queue
        self._collect(lambda each: each.kind == kind or self._queue in (lane, each.lane))
        began = None if self._single_rank else lane.moment()
        self._now = Pass(kind, self._version.number, max if backwards else min, lane, began)
        self._gather_order.begin(kind)

    @contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Gather within the pass in progress or, if there is none, in one of its own."""
        if self._now is not None:
            yield
            return
        self.begin(kind)
        try:
            yield
        finally:
            self.end()

    def comes_next(self, unit: Unit) -> bool:
        """Whether all ranks gather `unit` next, so that it may be gathered before it is needed."""
        return self._single_rank or (self._now is not None and self._gather_order.coming() == unit.index)

    def gather(self, unit: Unit) -> None:
        """Start gathering `unit` into its memory, when all ranks do."""
        if self._now is None:
            self.begin("what follows an inner pass")
            assert self._now is not None
        now = self._now
        before = [] if self._single_rank else self._gather_order.turn(unit.index)
        if before != []:
            self._progress.publish()
        if before is not None:
            gather = self._queue.gather(unit, during=now.kind).run
            unit.work = self._queue.submit(*self._taking_part(now, before), gather)
            return
        if self._streams.captures():
            raise PhaseError(
                f"unit {unit.name!r} is needed in {now.kind}, which a CUDA graph captures, but the last passes did "
                "not need it at this place: take three steps like the one to capture before"
            )
        now.beyond = True
        self._gather_order.add(unit.index)
        self._take_part(now)
        negotiate = partial(self._negotiate, now, unit)
        unit.work = now.lane.submit(negotiate, now.lane.gather(unit, during=now.kind).run)

    def wait(self, unit: Unit) -> None:
        """Wait for the weights.

        Raises:
            CommError: a peer failed, is late, or does something else.
        """
        try:
            self._queue.wait(unit)
        except CommError:
            self._fail()
            self._reports.raise_verdict()
            raise

    def need(self, unit: Unit) -> None:
        """Note that this pass uses the unit."""
        self._gather_order.need(unit.index)
        if self._now is not None:
            self._now.uses.append(unit.index)

    def end(self) -> None:
        """Take part in what is left of the pass, and in what others need beyond it. The host does not wait.

        A forked child takes no part: its pass has used weights that it has, or has failed.
        """
        now, self._now = self._now, None
        if now is None or self._single_rank or self._failed or not self._owner.is_here:
            return
        self._progress.publish_at_end()
        flags = self._gather_order.needed() if self._gather_order.is_due() else None
        serve = partial(self._serve, now, flags, list(self._gather_order.wanted))
        self._take_part(now)
        if not self._streams.captures():
            now.ending = now.lane.submit(serve, behind=now.began)
            self._ended.append(now)

    def confirm_ends(self) -> None:
        """Note that the program is from now on behind something that each rank does after the end of its passes."""
        for each in self._ended:
            each.confirmed = True

    def in_step(self) -> bool:
        """Return whether no rank has strayed. The host waits until all have ended the passes that it has.

        Raises:
            CommError: a pass could not be ended.
        """
        self._collect(lambda _: True)
        return self._streams.captures() or not self.strayed

    def settle(self) -> None:
        """Wait until all passes are over for every rank: weights must not change before.

        Raises:
            CommError: one could not be ended.
        """
        self._collect(lambda each: not each.confirmed)
        try:
            self._queue.finish()
        except CommError:
            self._fail()
            raise

    def _collect(self, which: Callable[[Pass], bool]) -> None:
        """Wait until passes are over for every rank, of those that have ended the ones up to the last of `which`."""
        if self._streams.captures():
            return
        last = max((place for place, each in enumerate(self._ended, 1) if which(each)), default=0)
        for first in self._ended[:last]:
            assert first.ending is not None
            try:
                first.ending.wait()
            except CommError:
                self._fail()
                raise
            del self._ended[0]  # after an interrupt it is waited for again: all ranks revise their orders
            self.strayed |= first.strayed
            first.revise()

    def _fail(self) -> None:
        """Serve no rank any more: ranks are out of step."""
        self._failed = True
        self._ended.clear()

    def _take_part(self, now: Pass) -> None:
        """Take part in what is left of the order."""
        if jobs := self._taking_part(now, self._gather_order.rest()):
            self._queue.submit(*jobs)

    def _taking_part(self, now: Pass, indices: Sequence[int]) -> list[Callable[[], None]]:
        return [self._queue.take_part(self._units[index], during=now.kind).run for index in indices]

    # ---- on the lane --------------------------------------------------------------------------------------------

    def _negotiate(self, now: Pass, unit: Unit) -> None:
        """Take part in what all ranks agree on, until that is `unit`."""
        while (choice := self._negotiation.agree(unit.index, now).choice) != unit.index:
            now.lane.take_part(self._units[choice], during=now.kind).run()

    def _serve(self, now: Pass, flags: Sequence[int] | None, wanted: Sequence[int]) -> None:
        """Take part in gathers of other ranks until all are at the end; then revise the gather order with them."""
        while (round_ := self._negotiation.agree(END, now, len(wanted))).choice != END:
            now.beyond = True
            now.lane.take_part(self._units[round_.choice], during=now.kind).run()
        now.strayed = now.beyond or not round_.alike
        if now.beyond:
            now.revise = partial(self._gather_order.extend, now.kind, self._negotiation.lists(wanted, round_.needed))
        elif flags is not None:
            ranks = self._negotiation.lists(flags, [len(flags)] * len(round_.needed))
            now.revise = partial(self._gather_order.shorten, now.kind, ranks)


def _checksum(text: str) -> int:
    return crc32(text.encode()) & 0x7FFFFFFF
