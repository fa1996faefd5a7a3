"""The states of a unit's weights and gradients, and the legal transitions between them."""

from enum import Enum

from shardlite.errors import PhaseError


class Weights(Enum):
    """The state of a unit's full weights."""

    SHARDED = "sharded"  # only this rank's shard is valid; the module's parameters are placeholders
    GATHERING = "gathering"  # all-gather in flight: the full weights must not be read
    FULL = "full"  # the full weights have users. The module's parameters are views of them, or still placeholders
    # where the users are handles in a graph, which need none
    IDLE = "idle"  # the full weights are valid, but have no users. Stage 3: parameters are placeholders, the buffer
    # may be evicted. Stages 1, 2: parameters stay views of the full weights, which have their own memory


class Gradients(Enum):
    """The content of a unit's gradient bucket."""

    EMPTY = "empty"  # nothing since the last reduction
    FILLING = "filling"  # this rank's own gradients, of one or more backwards
    REDUCING = "reducing"  # reduce-scatter in flight: bucket and gradient shard must not be touched


_LEGAL: tuple[tuple[Enum, Enum], ...] = (  # a tuple, because a dictionary lookup by an `Enum` calls Python code
    (Weights.SHARDED, Weights.GATHERING),
    (Weights.GATHERING, Weights.FULL),
    (Weights.FULL, Weights.IDLE),
    (Weights.IDLE, Weights.FULL),
    (Weights.IDLE, Weights.SHARDED),
    (Gradients.EMPTY, Gradients.FILLING),
    (Gradients.FILLING, Gradients.REDUCING),
    (Gradients.FILLING, Gradients.EMPTY),
    (Gradients.REDUCING, Gradients.EMPTY),
)


def check_move(unit: str, now: Enum, to: Enum) -> None:
    """Raise `PhaseError` unless the transition of `unit` from `now` to `to` is legal."""
    if (now, to) not in _LEGAL:
        legal = ", ".join(str(end.value) for start, end in _LEGAL if start is now)
        raise PhaseError(f"unit {unit!r}: cannot go from {now.value} to {to.value}; allowed: {legal}")
