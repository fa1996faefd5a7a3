"""Format the schedule of a collective as text: the pieces that each rank holds and sends in each step.

`frames` simulates a schedule symbolically: a segment is represented by the number of its owner, and a sum by the
order of its additions.
`text` formats a page for a terminal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import chain
from textwrap import wrap

from shardlite.comm import schedule as schedules
from shardlite.comm.schedule import Order, order_of_addition
from shardlite.comm.transfers import Schedule, Transfer

WIDTH, HEIGHT = 120, 100
"""The maximum number of columns of a page, and of lines in its tables.

If the tables of all ranks do not fit, rank 0 is shown.
"""

NARROW = 40
"""The minimum number of columns of a page, even if the terminal is narrower."""

_MOST = 2  # maximum number of neighbours that a sum lists if space is short
_LONGEST_NOTE = 42  # columns: a longer list of messages is replaced by the number of messages
_ORDERS = 8  # lines: with more segments, only the orders of the first few and of the final one are shown

_GIST = {
    "ring": "each rank sends to the next one",
    "bidirectional": "segments go both ways, halfway round the ring",
    "direct": "every rank sends to every other one at once",
    "hierarchical": "rings inside the nodes and rings across them",
    "halving": "ranks whose numbers differ in one binary digit exchange what they have",
}


@dataclass(frozen=True)
class Frame:
    """The state at the start of a step."""

    held: tuple[dict[tuple[int, int], Order], ...]
    """For each rank, the content of each `(segment, part)`: the order of its sum, or the owner of the segment."""

    sent: tuple[Transfer, ...]
    """Transfers of this step. The frame after the final step has no transfers."""

    def sent_by(self, rank: int) -> list[Transfer]:
        """Return the transfers from `rank` in this step."""
        return [each for each in self.sent if each.source == rank]


def frames(schedule: Schedule) -> list[Frame]:
    """Return a frame for each step of an all-gather or a reduce-scatter, and a frame for its end."""
    world, parts = range(schedule.world_size), range(schedule.parts)
    adds = schedule.operation == "reduce-scatter"
    held: list[dict[tuple[int, int], Order]] = [
        {(k, part): r for k in (world if adds else [r]) for part in parts} for r in world
    ]
    shown = []
    for transfers in schedule.steps:
        before = tuple(dict(each) for each in held)
        shown.append(Frame(before, transfers))
        coming: dict[tuple[int, tuple[int, int]], list[Order]] = {}
        for each in transfers:
            piece = each.segment, each.part
            coming.setdefault((each.target, piece), []).append(before[each.source][piece])
            if adds:
                del held[each.source][piece]
        for (rank, piece), parcels in coming.items():
            parcels += [held[rank][piece]] if adds else []
            held[rank][piece] = reduce(lambda first, second: (first, second), parcels)
    return [*shown, Frame(tuple(held), ())]


def text(schedule: Schedule, node: int = 1, width: int = WIDTH) -> str:
    """Return a page of `width` columns: a headline, a table per step, and a summary."""
    told = frames(schedule)
    head = chain(*(wrap(line, width) for line in headline(schedule, node)))
    page = _fitting(schedule, told, width) or _one_rank(schedule, told, width)
    return "\n".join([*head, "", *page, "", *summary(schedule), *_orders(schedule, width)])


def headline(schedule: Schedule, node: int) -> list[str]:
    """Return lines that describe the schedule, its start and its end."""
    world_size = schedule.world_size
    over = f"{schedule.operation} over {world_size} {_ranks(world_size)}"
    lines = [f"{over}, {schedule.algorithm}: {_GIST[schedule.algorithm]}"]
    if schedule.operation == "reduce-scatter":
        lines.append("Each rank begins with its own numbers for every segment. Rank k ends with the sum of segment k.")
        lines.append("A cell shows whose numbers are in the sum, in the order of addition.")
    else:
        lines.append("Rank k begins with segment k. Each rank ends with all of them.")
    if schedule.algorithm == "hierarchical":
        lines.append(f"Nodes are {node} ranks with consecutive numbers; there are {world_size // node}.")
    if schedule.parts == 2:
        lines.append("Each segment has two parts, a and b, of which each has a row.")
    return lines


def summary(schedule: Schedule) -> list[str]:
    """Return lines with the number of steps, and the messages and bytes per rank."""
    messages = len([each for each in chain(*schedule.steps) if each.source == 0])
    share = Fraction(messages, schedule.parts * schedule.world_size)
    return [
        f"steps               {len(schedule.steps)}",
        f"messages per rank   {messages}" + (", each half a segment" if schedule.parts == 2 else ""),
        f"bytes per rank      {share} of the buffer sent, as much received",
    ]


def brief(order: Order, world_size: int, most: int) -> str:
    """Format a sum. A run of more than `most` neighbours keeps the first two and the final one: `5+6+..+2`.

    With `most` below 3, an ascending run keeps the first and the final one: `5..2`. A descending run still keeps its
    first two, which show the direction.
    """
    terms: list[Order] = []
    while isinstance(order, tuple):
        order, last = order
        terms.append(last)
    written = []
    for run in _runs([order, *reversed(terms)], world_size):
        names = [str(each) if isinstance(each, int) else f"({brief(each, world_size, most)})" for each in run]
        if len(names) > most:
            up = most < 3 and (int(names[1]) - int(names[0])) % world_size == 1
            names = [f"{names[0]}..{names[-1]}"] if up else [*names[:2], "..", names[-1]]
        written += names
    return "+".join(written)


def shortened(world_size: int) -> str:
    """Return an example that explains the shortest form of a run of neighbours."""
    last = world_size - 1
    return f"{last - 1}..1 is {last - 1}+{last}+0+1"


def _runs(terms: Sequence[Order], world_size: int) -> Iterator[list[Order]]:
    """Split a sum into runs of neighbouring ranks, each ascending or descending."""
    run, ways = [terms[0]], {1, world_size - 1}
    for term in terms[1:]:
        before = run[-1]
        way = (term - before) % world_size if isinstance(term, int) and isinstance(before, int) else 0
        if way in ways:
            ways = {way}
            run.append(term)
        else:
            yield run
            run, ways = [term], {1, world_size - 1}
    yield run


def _fitting(schedule: Schedule, told: Sequence[Frame], width: int) -> list[str] | None:
    """Return the tables with as much content as fits, or `None` if they do not fit."""
    if len(told) * schedule.world_size * schedule.parts > HEIGHT:
        return None
    for most in (schedule.world_size, _MOST):
        # The table of the end has the longest sums, so it is left out first.
        for shown, rest in ((told, []), (told[:-1], ["", "end: see the sums below"])):
            lines = [*_tables(schedule, shown, most, width), *rest]
            if max(map(len, lines)) <= width:
                return lines
    return None


def _tables(schedule: Schedule, told: Sequence[Frame], most: int, width: int) -> list[str]:
    """Return a table per step, with one row per rank (two for segments of two parts) and one column per segment."""
    places = [(r, part) for r in range(schedule.world_size) for part in range(schedule.parts)]
    names = [name for r in range(schedule.world_size) for name in _row_names(f"rank {r}", schedule)]
    tables = [[_cells(frame, r, part, schedule, most) for r, part in places] for frame in told]
    widths = [max(map(len, column)) for column in zip(*chain(*tables), strict=True)]
    margin = max(map(len, names))
    ruler = " ".join(f"{k}".center(width) for k, width in enumerate(widths))
    legend = "Columns are segments; [ ] is sent in this step, . is not there"
    if any(".." in cell for cell in chain(*chain(*tables))):
        legend += f", {shortened(schedule.world_size)}"
    lines = wrap(f"{legend}.", width)
    for t, (frame, rows) in enumerate(zip(told, tables, strict=True)):
        title = f"step {t}" if frame.sent else "end"
        lines += ["", f"{title.ljust(margin)}  {ruler}".rstrip()]
        for (r, part), name, row in zip(places, names, rows, strict=True):
            note = f"  {_note(frame.sent_by(r), schedule)}" if part == 0 and frame.sent else ""
            lines.append(f"{name.ljust(margin)} |{'|'.join(map(str.center, row, widths))}|{note}")
    return lines


def _cells(frame: Frame, rank: int, part: int, schedule: Schedule, most: int) -> list[str]:
    """Return the content of the part with the number `part` of each segment on a rank. Sent pieces are in brackets."""
    sent = {each.segment for each in frame.sent_by(rank) if each.part == part}
    orders = [frame.held[rank].get((k, part)) for k in range(schedule.world_size)]
    names = ["." if order is None else brief(order, schedule.world_size, most) for order in orders]
    return [f"[{name}]" if k in sent else f" {name} " for k, name in enumerate(names)]


def _row_names(title: str, schedule: Schedule) -> list[str]:
    """Return the names of the rows of a rank or a step: two names if segments have two parts."""
    return [title] if schedule.parts == 1 else [f"{title} a", f"{'':{len(title)}} b"]


def _note(sent: Sequence[Transfer], schedule: Schedule) -> str:
    """Format a rank's transfers: `3 -> rank 1`."""
    pieces: dict[int, list[str]] = {}
    for each in sent:
        name = f"{each.segment}" + ("ab"[each.part] if schedule.parts == 2 else "")
        pieces.setdefault(each.target, []).append(name)
    targets: dict[str, list[str]] = {}
    for target, names in pieces.items():
        targets.setdefault(" ".join(names), []).append(f"{target}")
    note = ", ".join(f"{names} -> {_ranks(len(to))} {', '.join(to)}" for names, to in targets.items())
    return note if len(note) <= _LONGEST_NOTE else f"{len(sent)} messages -> {len(pieces)} {_ranks(len(pieces))}"


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _one_rank(schedule: Schedule, told: Sequence[Frame], width: int) -> list[str]:
    """Return one line per step about rank 0 (two lines if segments have two parts), with a letter per segment."""
    world, adds = range(schedule.world_size), schedule.operation == "reduce-scatter"
    legend = "o own numbers, + a sum, # the sum of all" if adds else "o there"
    lines = [
        *wrap("Not all ranks fit here. This is what rank 0 does; the others do the same from their places.", width),
        *wrap(f"Columns are segments: {legend}, > is sent in this step, . is not there.", width),
        "",
    ]
    titles = [f"step {t}" if frame.sent else "end" for t, frame in enumerate(told)]
    longest = max(map(len, titles))
    margin = len(_row_names(" " * longest, schedule)[0])
    tens = "".join(f"{k // 10}" if k % 10 == 0 and k else " " for k in world)
    ones = "".join(f"{k % 10}" for k in world)
    lines += [f"{'':{margin}}  {ruler}".rstrip() for ruler in (tens, ones) if ruler.strip()]
    for title, frame in zip(titles, told, strict=True):
        for part, name in enumerate(_row_names(f"{title:{longest}}", schedule)):
            letters = "".join(_letter(frame, (k, part), schedule) for k in world)
            note = _note(frame.sent_by(0), schedule) if part == 0 else ""
            line = f"{name}  {letters}   {note}".rstrip()
            lines += [line] if len(line) <= width else [f"{name}  {letters}", f"{'':{margin}}  {note}"]
    return lines


def _letter(frame: Frame, piece: tuple[int, int], schedule: Schedule) -> str:
    """Return the letter for a piece on rank 0."""
    if any((each.segment, each.part) == piece for each in frame.sent_by(0)):
        return ">"
    order = frame.held[0].get(piece)
    if order is None:
        return "."
    return {1: "o", schedule.world_size: "#"}.get(addends(order), "+")


def addends(order: Order) -> int:
    """Return the number of summands."""
    return 1 if isinstance(order, int) else addends(order[0]) + addends(order[1])


def _orders(schedule: Schedule, width: int) -> list[str]:
    """Return lines with the order of addition of each segment of a reduce-scatter."""
    if schedule.operation != "reduce-scatter":
        return []
    world_size = schedule.world_size
    pieces = [(k, part) for k in range(world_size) for part in range(schedule.parts)]
    orders = {piece: order_of_addition(schedule, *piece) for piece in pieces}
    ring = schedules.reduce_scatter("ring", world_size)
    same = all(_bits(order) == _bits(order_of_addition(ring, k)) for (k, _), order in orders.items())
    known = "that of the ring" if same else "not that of the ring: different bits"
    lines = ["", f"order of addition   {known}{': the same bits' if same and schedule.algorithm != 'ring' else ''}"]
    for (k, part), order in orders.items():
        if world_size <= _ORDERS or k < _ORDERS - 2 or k == world_size - 1:
            name = f"  segment {k}{'ab'[part] if schedule.parts == 2 else ''}"
            words = brief(order, world_size, most=_ORDERS).replace("+", " + ")
            lines += wrap(words, width, initial_indent=name.ljust(20), subsequent_indent=" " * 20)
        elif (k, part) == (_ORDERS, 0):
            lines.append("  ...")
    return lines


def _bits(order: Order) -> object:
    """Return a key that is equal for sums with equal bits: the tree of additions without the order of operands."""
    return order if isinstance(order, int) else frozenset(_bits(each) for each in order)
