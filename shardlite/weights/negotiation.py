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
from dataclasses import astuple, dataclass
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
    """Index of the unit that it wants to gather next, or `END`."""

    kind: int
    """Checksum of the kind of its pass."""

    step: int
    """Number of steps that it has taken."""

    needed: int
    """At the end of its pass: number of gathers that it has needed."""

    uses: int
    """At the end of its pass: checksum of the units that it has used, in their order."""


@dataclass(frozen=True)
class Round:
    """Result of a round."""

    choice: int
    """The unit that all gather now, or `END`."""

    needed: Sequence[int]
    """Number of gathers that each rank has needed so far."""

    alike: bool
    """At the end of a pass: whether all ranks have used the same units in the same order."""


@dataclass
class Pass:
    """One pass as the queues see it. Its end may still be running when later passes begin."""

    kind: str
    step: int
    """Number of steps that the rank had taken when it began."""

    prefer: Callable[[Sequence[int]], int]
    """Choose among the units that ranks want."""

    queue: GatherQueue
    """Runs rounds, and gathers that are not in the gather order."""

    began: Moment | None
    """The program's computation before it, which made the current weights."""

    uses: Sequence[int] = ()
    """At its end: the units that this rank has used, in their order."""

    exceeds: bool = False
    """Whether any rank has needed more than the gather order has."""

    diverged: bool = True
    """Whether ranks have used different units, or more than the gather order has, as far as is known."""

    confirmed: bool = False
    """Whether the program is behind its end on all ranks in any case."""

    ending: Work | None = None
    revise: Callable[[], None] = lambda: None
    """Revise the gather order by what all ranks have exchanged at the end."""


class Negotiation:
    """Negotiates gathers of one wrapped model with the ranks that share it, one round after the other."""

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        self._context = context
        self._names = names

    def agree(self, wants: int, during: Pass, needed: int = 0) -> Round:
        """Take part in one round. The pass chooses among what is wanted.

        Raises:
            DesyncError: ranks are in different passes, or have taken different numbers of steps.
            CommError: a peer failed or timed out.
        """
        kind = during.kind
        uses = list(during.uses) if wants == END else []
        mine = Proposal(wants, _checksum(kind), during.step, needed, _checksum(str(uses)))
        here = f"{self._wish(mine, kind)}, at step {mine.step}"
        if self._all_say(mine, here):
            return Round(wants, [needed] * self._context.transport.world_size, alike=True)
        said = self._exchange(astuple(mine), "the next gather", here)
        wishes, kinds, steps, needs, used = (list(column) for column in zip(*said, strict=True))
        if {*kinds} != {mine.kind} or {*steps} != {mine.step}:
            self._compare([Proposal(*each) for each in said], kind)
        wanted = sorted({*wishes} - {END})
        return Round(during.prefer(wanted) if wanted else END, needs, alike=len({*used}) == 1)

    def lists(self, mine: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Return the list of every rank, given their `lengths`."""
        padded = [*mine, *[0] * (max(lengths) - len(mine))]
        lists = self._exchange(padded, "the gathers of a pass", "its end") if padded else [[] for _ in lengths]
        return [each[:length] for each, length in zip(lists, lengths, strict=True)]

    def _all_say(self, mine: Proposal, during: str) -> bool:
        """Return whether all of many ranks are known to say the same. To find that out costs less than an exchange."""
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
        """Return what every rank says, [W, n]."""
        hosts, _ = self._context.hosts
        full = torch.zeros(hosts.world_size, len(mine), dtype=torch.int32)
        full[hosts.rank] = torch.tensor(mine, dtype=torch.int32)
        # The name does not contain the step: ranks that differ in it must meet here, to be told apart.
        operation = self._context.operation(
            f"negotiation of {what}", "order negotiation", at_any_step=True, during=during
        )
        self._context.progress.joins()
        all_gather(full.view(-1), hosts, operation=operation)
        said: list[list[int]] = full.tolist()
        return said

    def _compare(self, said: Sequence[Proposal], kind: str) -> NoReturn:
        """Raise, with what each rank does and where in its program. Each rank finds the same difference now.

        The program may wait in another operation, so the error is stored, too.
        """
        context, mine = self._context, said[self._context.transport.rank]
        doing = self._wish(mine, kind)
        here = f"rank {context.transport.rank}, in {doing},"
        rank, theirs = next(each for each in enumerate(said) if (each[1].step, each[1].kind) != (mine.step, mine.kind))
        if theirs.step != mine.step:
            why = (
                f"{here} has taken {mine.step} steps, but rank {rank} has taken {theirs.step}: a rank has left one "
                f"out. {SAME_PASSES}"
            )
        else:
            why = (
                f"{here} at step {mine.step}, meets rank {rank} in {self._wish(theirs, 'another pass')}. All ranks "
                f"must call the same modules, in one mode (train or eval, with or without gradients). {SAME_PASSES}"
            )
        others = context.reports.compare(f"{doing}, at step {mine.step}", why)
        context.reports.verdict = DesyncError(f"{why}{others}")
        raise context.reports.verdict

    def _wish(self, said: Proposal, kind: str) -> str:
        return f"the end of {kind}" if said.wants == END else f"{kind}, for unit {self._names[said.wants]!r}"


class Passes:
    """The passes of one wrapped model, one at a time. Decides which unit all ranks gather when."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self.order = GatherOrder()
        self.diverged = False
        """Whether ranks have used different units in a pass since this was set to false."""

        self._units = units
        self._single_rank = context.transport.world_size == 1
        self._owner = context.owner
        self._progress = context.progress
        self._reports = context.reports
        self._version = context.version
        self._streams = context.streams
        self._queue = GatherQueue(context)
        self._negotiated = GatherQueue(context, by_hosts=True)
        self._negotiation = Negotiation(context, [unit.name for unit in units])
        self._now: Pass | None = None
        self._ended: list[Pass] = []  # until they are collected
        self._failed = False

    def begin_pass(self, kind: str, *, backwards: bool = False, final: bool = False, repeats: bool = False) -> None:
        """Start a pass. Passes of one kind are expected to need the same units.

        Args:
            kind: name of the kind.
            backwards: whether units that were registered last are gathered first if ranks need different ones.
            final: whether a step follows, after which all weights are stale.
            repeats: whether the units that this rank uses are expected to be those of the last pass of the kind.

        Raises:
            CommError: the last pass of the kind could not be ended: a peer failed, timed out or does something else.
        """
        self.end_pass()  # of one that an interrupt left
        self._reports.raise_verdict()
        queue = self._negotiated if self.order.knows(kind) else self._queue
        self._collect(lambda each: each.kind == kind or self._queue in (queue, each.queue))
        began = None if self._single_rank else queue.moment()
        self._now = Pass(kind, self._version.number, max if backwards else min, queue, began)
        self.order.begin_pass(kind, final=final, repeats=repeats)

    def end_pass(self) -> None:
        """Take part in what is left of the pass, and in what others need beyond it. The host does not wait.

        A forked child takes no part: its pass has used weights that it has, or has failed.
        """
        now, self._now = self._now, None
        if now is None or self._single_rank or self._failed or not self._owner.is_here:
            return
        self._progress.publish_at_end()
        now.uses = list(self.order.uses)
        flags = self.order.needed() if self.order.is_due() else None
        serve = partial(self._serve, now, flags, list(self.order.wanted))
        self._take_part(now)
        if not self._streams.captures():
            now.ending = now.queue.submit(serve, behind=now.began)
            self._ended.append(now)

    @contextmanager
    def inside_pass(self, kind: str) -> Iterator[None]:
        """Gather within the pass in progress or, if there is none, in one of its own."""
        if self._now is not None:
            yield
            return
        self.begin_pass(kind)
        try:
            yield
        finally:
            self.end_pass()

    def comes_next(self, unit: int) -> bool:
        """Return whether all ranks gather a unit next, so that it may be gathered before it is needed."""
        return self._single_rank or (self._now is not None and self.order.next_gather() == unit)

    def turn(self, unit: Unit) -> tuple[GatherQueue, Sequence[Callable[[], None]], str]:
        """Return the queue on which all ranks gather `unit`, what runs there before, and the kind of the pass."""
        if self._now is None:
            self.begin_pass("what follows an inner pass")
            assert self._now is not None
        now = self._now
        before = [] if self._single_rank else self.order.turn(unit.index)
        if before != []:
            self._progress.publish()
        if before is not None:
            return self._queue, self._taking_part(now, before), now.kind
        if self._streams.captures():
            raise PhaseError(
                f"unit {unit.name!r} is needed in {now.kind}, which a CUDA graph captures, but the last passes did "
                "not need it at this place: take three steps like the one to capture before"
            )
        now.exceeds = True
        self.order.append(unit.index)
        self._take_part(now)
        return now.queue, [partial(self._negotiate, now, unit)], now.kind

    def confirm_ends(self) -> None:
        """Record that the program is from now on behind something that each rank does after the end of its passes."""
        for each in self._ended:
            each.confirmed = True

    def in_step(self) -> bool:
        """Return whether all ranks have used the same units. The host waits until all have ended the last passes.

        Raises:
            CommError: a pass could not be ended.
        """
        self._collect(lambda _: True)
        return self._streams.captures() or not self.diverged

    def settle(self) -> None:
        """Wait until all passes are over for every rank: weights must not change before.

        Raises:
            CommError: one could not be ended.
        """
        self._collect(lambda each: not each.confirmed)
        try:
            self._queue.drain()
        except CommError:
            self._stop_serving()
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
                self._stop_serving()
                raise
            del self._ended[0]  # after an interrupt it is waited for again: all ranks revise their orders
            self.diverged |= first.diverged
            first.revise()

    def _stop_serving(self) -> None:
        """Serve no rank any more: ranks are out of step."""
        self._failed = True
        self._ended.clear()

    def _take_part(self, now: Pass) -> None:
        """Take part in what is left of the order."""
        if steps := self._taking_part(now, self.order.rest()):
            self._queue.submit(*steps)

    def _taking_part(self, now: Pass, indices: Sequence[int]) -> list[Callable[[], None]]:
        return [self._queue.take_part(self._units[index], during=now.kind).execute for index in indices]

    # ---- on the queue -----------------------------------------------------------------------------------------------

    def _negotiate(self, now: Pass, unit: Unit) -> None:
        """Take part in what all ranks agree on, until that is `unit`."""
        while (choice := self._negotiation.agree(unit.index, now).choice) != unit.index:
            now.queue.take_part(self._units[choice], during=now.kind).execute()

    def _serve(self, now: Pass, flags: Sequence[int] | None, wanted: Sequence[int]) -> None:
        """Take part in gathers of other ranks until all are at the end; then revise the gather order with them."""
        while (round_ := self._negotiation.agree(END, now, len(wanted))).choice != END:
            now.exceeds = True
            now.queue.take_part(self._units[round_.choice], during=now.kind).execute()
        now.diverged = now.exceeds or not round_.alike
        if now.exceeds:
            now.revise = partial(self.order.extend, now.kind, self._negotiation.lists(wanted, round_.needed))
        elif flags is not None:
            ranks = self._negotiation.lists(flags, [len(flags)] * len(round_.needed))
            now.revise = partial(self.order.shorten, now.kind, ranks)


def _checksum(text: str) -> int:
    return crc32(text.encode()) & 0x7FFFFFFF
