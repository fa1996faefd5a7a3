"""Further names for packages that build on ShardLite, such as trainers and averages of weights.

    launched_ranks, ranks_of                   the ranks
    agree                                      all ranks raise one error, or none does
    models_of, steps_shards                    the models and the kind of an optimizer
    reducing, stand_ins, gather_state_dicts    gradients and names of a wrapped model
    read_from                                  values of parameters that are on the meta device
    Weights                                    this rank's part of the weights, for averages
    patch, install                             changes in other packages, see docs/patches.md

`shardlite.integrations` and `shardlite.EMA` use these names and no others. `tests/project/test_extend.py` checks this.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from shardlite import comm
from shardlite.comm import GroupLike
from shardlite.config import launched_ranks
from shardlite.engine import models_with
from shardlite.errors import some_of
from shardlite.grads import Mode
from shardlite.model import ModelState, ShardLite
from shardlite.params import Flat, allocate_arenas
from shardlite.patches import install, patch
from shardlite.wrapping import flats_of
from shardlite.wrapping.init import set_values as read_from

__all__ = [
    "Flat",
    "GroupLike",
    "Ranks",
    "Weights",
    "agree",
    "gather_state_dicts",
    "install",
    "launched_ranks",
    "models_of",
    "patch",
    "ranks_of",
    "read_from",
    "reducing",
    "some_of",
    "stand_ins",
    "steps_shards",
]


class Ranks(NamedTuple):
    """The place of this process among the ranks of a wrapped model."""

    rank: int
    """Number of this rank among all ranks, those of other replicas included."""

    world_size: int
    """Number of all ranks."""

    shard: int | None
    """Index of the part of the weights that this rank keeps. `None` if it keeps all weights (stage 0)."""

    shards: int
    """Number of ranks over which the weights are sharded."""


def ranks_of(model: ShardLite) -> Ranks:
    """Return the place of this process among the ranks of a model.

    Raises:
        TypeError: `model` is not a `ShardLite` model.
    """
    state = ModelState(model)
    return Ranks(state.context.rank, state.context.world_size, state.shard, state.context.transport.world_size)


def agree(
    ranks: ShardLite | GroupLike,
    what: str,
    facts: Sequence[str] = (),
    problem: Exception | None = None,
    *,
    subject: str = "models",
) -> None:
    """Raise an error on every rank if any rank has a problem, or if its facts differ from rank 0's. Collective.

    Args:
        ranks: a wrapped model, or ranks as for `ShardLite(group=...)`.
        what: the call that the ranks make, for messages.
        facts: lines that must be the same on all ranks.
        problem: an error of this rank. Other ranks do not wait for this rank.
        subject: what the facts describe, for messages.

    Raises:
        LayoutError: another rank has a problem, or the facts of ranks differ.
        CommError: a rank did not make the call in time.
        Exception: `problem`, on the rank that passed it.

    Example:
        >>> agree(model, "load", [str(path)], problem)
    """
    if not isinstance(ranks, ShardLite):
        comm.agree(comm.ranks_of(ranks), facts, problem, what=what, subject=subject)
        return
    state = ModelState(ranks)
    timeout, watch = state.context.timeout, state.context.reports.watching
    comm.agree(state.ranks, facts, problem, what=what, timeout=timeout, subject=subject, watch=watch)


def models_of(tensors: Iterable[Tensor]) -> list[ShardLite]:
    """Return the wrapped models to which `tensors` belong, each model once.

    Args:
        tensors: shards (`model.parameters()`), parameters of modules (`model.module.parameters()`), and other tensors,
            which belong to no model. A model that was unwrapped has no tensors.

    Example:
        >>> models_of(param for group in optimizer.param_groups for param in group["params"])
    """
    return [model for each in models_with(tensors) if (model := each.model()) is not None]


def steps_shards(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may step shards, because it computes each element by itself.

    Other optimizers need `WholeParameters`. A trial of the optimizer's class and options decides. Not collective.
    """
    from shardlite.optimizers import probe_shards  # few programs need it

    return bool(probe_shards(optimizer).same)


# ---- a wrapped model ------------------------------------------------------------------------------------------------


def reducing(model: ShardLite) -> AbstractContextManager[None]:
    """Return a context in which backwards reduce gradients, also inside `model.no_sync()`."""
    return ModelState(model).bridge.backward.accumulating(Mode.STEP)


def gather_state_dicts(model: ShardLite) -> None:
    """Make later calls of `state_dict()` of the module and its submodules gather weights instead of raising.

    Every rank must call `state_dict()`, and gets full weights on the CPU.
    """
    ModelState(model).full.gathers_states = True


@contextmanager
def stand_ins(model: ShardLite, weights: Mapping[str, Tensor] = {}) -> Iterator[dict[str, Tensor]]:
    """Put tensors in the places of the module's parameters inside the context. Not collective.

    So `state_dict()` of the module, of its submodules and of code around them has names and shapes, without a gather.

    Args:
        model: a wrapped model.
        weights: full weights, of any shape, by the names of `full_state_dict()`. Other parameters are on the meta
            device.

    Returns:
        A context manager. `with` binds the parameters and buffers of the module by the names of `full_state_dict()`. A
        parameter has the full shape, but values only while it is gathered.

    Raises:
        KeyError: the model has no such name.
    """
    full = ModelState(model).full
    entries = full.entries()
    with full.naming({entries[name]: weight for name, weight in weights.items()}):
        yield entries


class Weights:
    """This rank's part of a model's weights, for objects that average or exchange weights.

    A weight is kept in a flat, a 1-D buffer with the parameters of one dtype in a unit. The rank keeps `flat.local`
    [n], or all elements at stage 0. If weights are split, `flat.local` has the upper 16 bits of each, and `flat.low`
    the lower ones. `flat.layout.slots` has the name of each parameter.

    Args:
        model: a wrapped model.

    Raises:
        TypeError: `model` is not a `ShardLite` model.
    """

    def __init__(self, model: ShardLite) -> None:
        self._state = ModelState(model)

    @property
    def flats(self) -> list[Flat]:
        """All flats, in the order of the units."""
        return flats_of(self._state.units)

    @property
    def in_use(self) -> bool:
        """Whether a forward, a backward or `gathered()` uses full weights now."""
        return any(unit.users for unit in self._state.units)

    @property
    def is_captured(self) -> bool:
        """Whether the program captures a CUDA graph now, whose replays would repeat changes of the weights."""
        return self._state.context.streams.captures()

    def allocate(self, flats: Sequence[Flat], purpose: str) -> list[Tensor]:
        """Allocate a tensor like `weights()` [n] of each flat. `model.memory()` counts them under `purpose`.

        If flats are adjacent in memory, so are their tensors.
        """
        kinds = [(flat.master, flat.layout.trainable) for flat in flats]
        device, ledger = self._state.context.device, self._state.context.ledger
        memory = allocate_arenas(kinds, [flat.local.numel() for flat in flats], device)
        for each in memory:
            ledger.track(purpose, each)
        return memory

    def follow(self, follower: Any) -> None:
        """Call `follower.before_change()` before each change of the weights, while the follower exists."""
        self._state.bridge.in_backward.followers.add(follower)

    def announce_change(self) -> None:
        """Call `before_change()` of all followers.

        Raises:
            PhaseError: a follower has raised it, such as an `EMA` inside `swapped()`.
        """
        self._state.bridge.in_backward.announce_change()

    def settle(self) -> None:
        """Wait until no rank needs the current weights. Collective."""
        self._state.settle()

    def mark_changed(self) -> None:
        """Record that all weights were changed, on every rank."""
        self._state.bridge.mark_changed()
