"""Decide when units are gathered (stage 3), so that all ranks gather the same units even if their needs differ.

Ranks whose forwards take different branches need different units. In each pass, all ranks gather the units of a
recorded order (`gather_order.py`), whether they need these units or not. A rank that needs a unit outside of the order
first takes part in the remaining gathers of the order, then negotiates. A rank that has ended its pass takes part in
the gathers of other ranks until all ranks have ended their passes. Meanwhile, the rank's program continues.

In a round of the negotiation, every rank sends the unit that it wants to gather next, or reports that its pass has
ended. All ranks then gather one of the wanted units. In a forward this is the unit that was registered first, in a
backward the unit that was registered last. Ranks that wanted this unit continue, and the other ranks negotiate again.
The rounds end when all ranks have ended the pass.

    round   rank 0 wants   rank 1 wants   gathered by both
    1       blocks.0       blocks.2       blocks.0
    2       blocks.1       blocks.2       blocks.1
    3       blocks.2       blocks.2       blocks.2
    4       (end)          (end)

The messages are a few integers on the host, for weights on any device. A unit that only other ranks need is gathered to
temporary memory, which is freed immediately. Such a gather costs the unit's bytes in traffic and, while it runs, in
memory. `traffic()` counts the bytes under `take part`.

If all ranks use the same units, a step waits for no negotiation, with one exception: a backward on a GPU waits for the
last round of its forward, whose result decides whether streams may wait for reductions. Gathers of the recorded order
run on one queue, which runs nothing else. A separate thread runs the rounds and the negotiated gathers:

    program       forward | gathers of its order | loss | gathers of the backward | flags | step | next forward
    negotiation           |-- end of the forward ------------- collected before the next forward -|
                                                        |-- end of the backward --- before the next backward -|

So a rank that is ahead may have started gathers of the next pass while another rank requests a unit in the current
pass. The gathers of the two ranks do not conflict, because negotiated gathers are sent through host memory, in messages
with names. Negotiated gathers are stream-ordered after the computation before the pass, but not after the computation
inside the pass. At least one round per pass is necessary, because no rank knows whether another rank will request a
unit. A rank waits for the last round of a pass when the next pass of the same kind begins, because that pass needs the
revised order. By then all ranks have long ended the earlier pass, unless a rank is a step behind.

Weights must not change while another rank may request them. After a backward, a rank need not wait for the last round,
because each rank sends its gradient flags after it has ended its pass. So everything that follows the flags, such as
the step, runs after all ranks have ended their passes, both on the stream and on the host. Other changes of weights
wait for the last round.

The first pass of a kind has no order yet. All its gathers are negotiated, on the queue of the recorded orders, and end
before another pass begins.

A pass that a CUDA graph captures is replayed without the hosts, so it has no rounds. On every rank, such a pass must
need the units in the recorded order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch

from shardlite.comm import Context, Moment, Operation, Work, all_gather
from shardlite.errors import SAME_PASSES, CommError, DesyncError, PhaseError
from shardlite.params import Unit
from shardlite.weights.all_gather import GatherQueue
from shardlite.weights.gather_order import GatherOrder

END = -1
"""Value of `Proposal.wants` for a rank that has ended its pass."""


class Proposal(NamedTuple):
    """The message of one rank in a round."""

    wants: int
    """Index of the unit that the rank wants to gather next, or `END`."""

    kind: int
    """Checksum of the kind of the rank's pass."""

    step: int
    """Number of steps that the rank has taken."""

    needed: int
    """At the end of a pass: number of gathers that the rank has needed in the pass."""

    uses: int
    """At the end of a pass: checksum of the units that the rank has used, in order."""


class Round(NamedTuple):
    """The result of a round."""

    choice: int
    """Index of the unit that all ranks gather now, or `END`."""

    needed: Sequence[int]
    """Number of gathers that each rank has needed so far."""

    alike: bool
    """At the end of a pass: whether all ranks have used the same units in the same order."""


@dataclass
class Pass:
    """The record of one pass, for the queues. The last round of a pass may still run when later passes begin."""

    kind: str
    step: int
    """Number of steps that the rank had taken when the pass began."""

    prefer: Callable[[Sequence[int]], int]
    """Function that chooses one unit from the units that ranks want."""

    queue: GatherQueue
    """Queue of the rounds, and of gathers that are not in the gather order."""

    began: Moment | None
    """Moment when the pass began. The computation before this moment has written the current weights."""

    uses: Sequence[int] = ()
    """Units that this rank has used, in order. Set at the end of the pass."""

    exceeds: bool = False
    """Whether any rank has needed more gathers than the gather order has."""

    diverged: bool = True
    """Whether ranks have used different units, or exceeded the gather order. `True` until the last round has ended."""

    confirmed: bool = False
    """Whether later operations of the program already wait until all ranks have ended the pass."""

    ending: Work | None = None
    revise: Callable[[], None] = lambda: None
    """Function that revises the gather order. It uses the lists that ranks have exchanged at the end of the pass."""


class Negotiation:
    """Negotiates gathers of one wrapped model with the ranks that share it, one round after the other."""

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        self._context = context
        self._names = names

    def agree(self, wants: int, during: Pass, needed: int = 0) -> Round:
        """Take part in one round. If ranks want different units, `prefer` of the pass chooses one.

        Raises:
            DesyncError: ranks are in different passes, or have taken different numbers of steps.
            CommError: a peer failed or timed out.
        """
        kind, rounds = during.kind, self._context.rounds
        uses = list(during.uses) if wants == END else []
        mine = Proposal(wants, _checksum(kind), during.step, needed, _checksum(str(uses)))
        here = f"{self._wish(mine, kind)}, at step {mine.step}"
        if rounds is not None:  # with many ranks, a comparison costs less than an exchange
            operation = self._operation("the next gather, whether all say the same", here)
            if rounds.are_equal(mine, operation):
                return Round(wants, [needed] * self._context.transport.world_size, alike=True)
        proposals = [Proposal(*each) for each in self._exchange(mine, "the next gather", here)]
        wishes, kinds, steps, needs, used = zip(*proposals, strict=True)
        if {*kinds} != {mine.kind} or {*steps} != {mine.step}:
            self._compare(proposals, kind)
        wanted = sorted({*wishes} - {END})
        return Round(during.prefer(wanted) if wanted else END, needs, alike=len({*used}) == 1)

    def lists(self, mine: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Send this rank's list `mine` to all ranks. Return the lists of all ranks, which have the given `lengths`."""
        padded = [*mine, *[0] * (max(lengths) - len(mine))]
        lists = self._exchange(padded, "the gathers of a pass", "its end") if padded else [[] for _ in lengths]
        return [each[:length] for each, length in zip(lists, lengths, strict=True)]

    def _exchange(self, mine: Sequence[int], what: str, during: str) -> list[list[int]]:
        """Exchange numbers with the other ranks: send `mine` [n], and return the numbers of all ranks, [W, n]."""
        hosts, _ = self._context.hosts
        full = torch.zeros(hosts.world_size, len(mine), dtype=torch.int32)
        full[hosts.rank] = torch.tensor(mine, dtype=torch.int32)
        all_gather(full.view(-1), hosts, operation=self._operation(what, during))
        numbers: list[list[int]] = full.tolist()
        return numbers

    def _operation(self, what: str, during: str) -> Operation:
        """Name an operation that begins now. The name omits the step, so that ranks at different steps meet."""
        operation = self._context.operation(
            f"negotiation of {what}", "order negotiation", at_any_step=True, during=during
        )
        self._context.progress.joins()
        return operation

    def _compare(self, proposals: Sequence[Proposal], kind: str) -> NoReturn:
        """Raise an error that describes two ranks with different passes or steps. Every rank raises such an error.

        The error is also stored, because the program may be waiting in another operation.
        """
        context, mine = self._context, proposals[self._context.transport.rank]
        doing = self._wish(mine, kind)
        here = f"rank {context.transport.rank}, in {doing},"
        rank, theirs = next(
            each for each in enumerate(proposals) if (each[1].step, each[1].kind) != (mine.step, mine.kind)
        )
        if theirs.step != mine.step:
            why = (
                f"{here} has taken {mine.step} steps, but rank {rank} has taken {theirs.step}: a rank has skipped a "
                f"step. {SAME_PASSES}"
            )
        else:
            why = (
                f"{here} at step {mine.step}, meets rank {rank} in {self._wish(theirs, 'another pass')}. All ranks "
                f"must call the same modules, in one mode (train or eval, with or without gradients). {SAME_PASSES}"
            )
        with context.reports.deciding:
            others = context.reports.compare(f"{doing}, at step {mine.step}", why)
            context.reports.verdict = DesyncError(f"{why}{others}")
        raise context.reports.verdict

    def _wish(self, proposal: Proposal, kind: str) -> str:
        return f"the end of {kind}" if proposal.wants == END else f"{kind}, for unit {self._names[proposal.wants]!r}"


class Passes:
    """The passes of one wrapped model, one at a time. Decides which unit all ranks gather next."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self.order = GatherOrder()
        self.diverged = False
        """Whether ranks have used different units in a pass since the flag was set to `False`."""

        self._units = units
        self._single_rank = context.transport.world_size == 1
        self._context = context
        self._reports = context.reports
        self._streams = context.streams
        self._queue = GatherQueue(context)
        self._negotiated = GatherQueue(context, by_hosts=True)
        self._negotiation = Negotiation(context, [unit.name for unit in units])
        self._now: Pass | None = None
        self._ended: list[Pass] = []  # ended passes, until `_collect` waits for their last rounds
        self._failed = False

    def begin_pass(self, kind: str, *, backwards: bool = False, final: bool = False, repeats: bool = False) -> None:
        """Start a pass. Passes of one kind are expected to need the same units.

        Args:
            kind: name of the kind.
            backwards: whether ranks that need different units first gather the unit that was registered last.
            final: whether a step follows, after which all weights are stale.
            repeats: whether this rank is expected to use the same units as in the previous pass of the kind.

        Raises:
            CommError: the previous pass of the kind did not end on all ranks, because a peer failed, timed out or
                called a different operation.
        """
        self.end_pass()  # a pass is still open if an interrupt has prevented its end
        self._reports.raise_verdict()
        queue = self._negotiated if self.order.knows(kind) else self._queue
        self._collect(lambda each: each.kind == kind or self._queue in (queue, each.queue))
        began = None if self._single_rank else queue.moment()
        self._now = Pass(kind, self._context.version.number, max if backwards else min, queue, began)
        self.order.begin_pass(kind, final=final, repeats=repeats)

    def end_pass(self) -> None:
        """Take part in the remaining gathers of the pass and in further gathers of other ranks. The host does not wait.

        A forked child process takes no part: its pass either has used only weights that the child already has, or has
        failed.
        """
        now, self._now = self._now, None
        if now is None or self._single_rank or self._failed or not self._context.owner.is_here:
            return
        self._context.progress.publish_at_end()
        now.uses = list(self.order.uses)
        flags = self.order.needed() if self.order.is_due() else None
        serve = partial(self._serve, now, flags, list(self.order.wanted))
        self._take_part(now)
        if not self._streams.captures():
            now.ending = now.queue.submit(serve, behind=now.began)
            self._ended.append(now)

    @contextmanager
    def inside_pass(self, kind: str) -> Iterator[None]:
        """Gather within the current pass. If no pass is running, begin a new pass and end it after the block."""
        if self._now is not None:
            yield
            return
        self.begin_pass(kind)
        try:
            yield
        finally:
            self.end_pass()

    def gather(self, unit: Unit) -> None:
        """Start the gather of a unit into its buffer, after the gathers that all ranks make before it."""
        if self._now is None:
            self.begin_pass("what follows an inner pass")
            assert self._now is not None
        now = self._now
        before = [] if self._single_rank else self.order.turn(unit.index)
        if before == []:
            self._queue.gather(unit, during=now.kind)
            return
        self._context.progress.publish()
        if before is not None:
            self._queue.gather(unit, *self._taking_part(now, before), during=now.kind)
            return
        if self._streams.captures():
            raise PhaseError(
                f"unit {unit.name!r} is needed in {now.kind}, which a CUDA graph captures, but the last passes did "
                "not need it at this place: before the capture, run three steps like the captured one"
            )
        now.exceeds = True
        self.order.append(unit.index)
        self._take_part(now)
        now.queue.gather(unit, partial(self._negotiate, now, unit), during=now.kind)

    def wait(self, unit: Unit) -> None:
        """Wait for the gather of a unit, which must be in flight.

        Raises:
            CommError: a peer failed, timed out or called a different operation.
        """
        try:
            self._queue.wait(unit)
        except CommError:
            self._stop_serving()
            self._reports.raise_verdict()
            raise

    def confirm_ends(self) -> None:
        """Record that the program has waited for an operation that each rank starts after the end of its passes."""
        for each in self._ended:
            each.confirmed = True

    def in_step(self) -> bool:
        """Return whether all ranks have used the same units. The host waits until all ranks have ended their passes.

        Raises:
            CommError: a pass did not end on all ranks.
        """
        self._collect(lambda _: True)
        return self._streams.captures() or not self.diverged

    def settle(self) -> None:
        """Wait until every rank has ended all passes, because weights must not change before that.

        Raises:
            CommError: a pass did not end on all ranks.
        """
        self._collect(lambda each: not each.confirmed)
        try:
            self._queue.drain()
        except CommError:
            self._stop_serving()
            raise

    def _collect(self, which: Callable[[Pass], bool]) -> None:
        """Wait until all ranks have ended the passes in `_ended`, up to the last pass for which `which` is `True`."""
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
            if self._failed:  # another thread has found a failure during the wait
                self._reports.raise_verdict()
            del self._ended[0]  # after the wait, because an interrupt must not skip the revision of the order
            self.diverged |= first.diverged
            first.revise()

    def abandon_capture(self) -> None:
        """Forget the pass of a capture that has failed. No rank has run its gathers."""
        self._now = None
        self._queue.abandon_capture()

    def _stop_serving(self) -> None:
        """Stop serving other ranks, because ranks are out of step."""
        self._failed = True
        self._ended.clear()

    def _take_part(self, now: Pass) -> None:
        """Take part in the remaining gathers of the order."""
        if steps := self._taking_part(now, self.order.rest()):
            self._queue.submit(*steps)

    def _taking_part(self, now: Pass, indices: Sequence[int]) -> list[Callable[[], None]]:
        return [self._queue.take_part(self._units[index], during=now.kind).execute for index in indices]

    # ---- on the queue -----------------------------------------------------------------------------------------------

    def _negotiate(self, now: Pass, unit: Unit) -> None:
        """Take part in negotiated gathers, until all ranks agree on `unit`."""
        while (choice := self._negotiation.agree(unit.index, now).choice) != unit.index:
            now.queue.take_part(self._units[choice], during=now.kind).execute()

    def _serve(self, now: Pass, flags: Sequence[int] | None, wanted: Sequence[int]) -> None:
        """Take part in gathers of other ranks until every rank has ended the pass. Then prepare to revise the order."""
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
