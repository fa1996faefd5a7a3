"""Inspect a sharded model, and train it side by side with its twin."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite import NonFiniteWarning, Precision, ShardLite
from shardlite.params import as_real
from shardlite.wrapping.partition import UnitPolicy
from tests.support.internals import flats, units
from tests.support.twins.plain import RECIPES, Recipe, Twin


@dataclass(frozen=True)
class Turn:
    """One forward and backward of one rank. All batches follow from it, so any rank knows those of the others."""

    step: int
    rank: int
    micro: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(10_000 * self.step + 100 * self.rank + self.micro)


STAGES = (0, 1, 2, 3)


def some_stages(*sample: int) -> tuple[int, ...]:
    """Return the stages for a body of ranks: the sample, or all where slow tests run."""
    return STAGES if EVERY_STAGE in os.environ else sample


EVERY_STAGE = "SHARDLITE_TEST_EVERY_STAGE"
"""In the environment where slow tests run."""


def slow(*values: object) -> Any:
    """Leave a case of `parametrize` to the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


WIDE = slow(4)
"""More ranks than two, where two show the subject: what ranks do in a ring of more is shown in `test_parity.py`."""

_Body = TypeVar("_Body", bound=Callable[..., Any])


def without_warnings(body: _Body) -> _Body:
    """Suppress the warning about skipped steps in a body."""

    @wraps(body)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)
            return body(*args, **kwargs)

    return quiet  # type: ignore[return-value]


Loss = Callable[[Callable[..., Any], Turn], Tensor]
"""From a model and a turn."""


def same_bits(what: str, got: Tensor, expected: Tensor) -> None:
    """Compare bits: 0 differs from -0, and a NaN is never equal."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} instead of {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {list(got.shape)} instead of {list(expected.shape)}"
    got, expected = as_real(got), as_real(expected)
    wrong = (got != expected) | (torch.signbit(got) != torch.signbit(expected))
    if wrong.any():
        pairs = list(zip(got[wrong][:3].tolist(), expected[wrong][:3].tolist(), strict=True))
        raise AssertionError(f"{what}: {int(wrong.sum())} of {got.numel()} elements differ, (got, expected): {pairs}")


def same_states(what: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare tensors by name."""
    assert got.keys() == expected.keys(), f"{what}: {got.keys() ^ expected.keys()}"
    for name, value in expected.items():
        same_bits(f"{what}: {name!r}", got[name].detach(), value.detach())


def with_twin(module: nn.Module, group: object, **options: Any) -> tuple[ShardLite, nn.Module]:
    """Wrap a module; return the model and a plain copy of the module."""
    twin = copy.deepcopy(module)
    return ShardLite(module, group=group, **options), twin


def local_parts(model: ShardLite, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut whole tensors, named like the model's parameters, into what this rank's shards hold."""
    parts = {}
    for flat in flats(model):
        for row, slot in enumerate(flat.layout.slots):
            if slot.name in full:
                parts[slot.name] = flat.part_of(row, full[slot.name].detach())
    return parts


def assert_gradients_equal(model: ShardLite, twin: nn.Module) -> None:
    """Every shard's gradient is, to the bit, its part of the twin's: valid where all ranks computed the same."""
    expected = local_parts(model, {n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
    for name, shard in model.named_parameters():
        if name not in expected:
            assert shard.grad is None, f"{name}: the twin has no gradient"
        else:
            assert shard.grad is not None, f"{name}: no gradient"
            torch.testing.assert_close(shard.grad, expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def most_buffers(model: ShardLite) -> int:
    """Return how many buffers of the (equal) blocks there were at most at once, since the last `reset_peak`."""
    block = next(unit for unit in units(model) if not unit.keep_unsharded)
    kept = sum(unit.nbytes for unit in units(model) if unit.keep_unsharded)
    return (model.ledger.peak()["gather buffers"] - kept) // block.nbytes


def gathers(model: ShardLite) -> dict[str, int]:
    """Return how often each unit has been gathered since the trace was last taken."""
    names = [event.split()[1] for event in model.trace.take() if event.startswith("gather ")]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def compare(
    module: nn.Module, loss: Callable[[nn.Module], Tensor], group: object, **options: object
) -> tuple[ShardLite, nn.Module]:
    """Run one forward and backward of a module and of its sharded copy; the gradients must be the same bits."""
    model, twin = with_twin(module, group, **options)
    model.trace.take()
    model.ledger.reset_peak()
    loss(twin).backward()
    loss(model).backward()
    assert_gradients_equal(model, twin)
    return model, twin


class Pair:
    """A sharded model and its twin, trained side by side on each rank: they must have the same bits all along.

    `options` are those of `ShardLite`, `replicas` of the ranks in `group` each share a model. The ranks compute the
    twin `together`, each on its own batch; where a rank may run ahead of the others, each computes all of it.
    """

    make_twin: type[Twin] = Twin
    _due = False
    """Whether rank 0's buffers are to be those of all."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        group: Any,
        *,
        recipe: str | Recipe = "adamw",
        units: UnitPolicy = None,
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        replicas: int = 1,
        together: bool = True,
        **options: Any,
    ) -> None:
        module, plain = (_seeded(make) for _ in range(2))
        everyone = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
        self.rank = dist.get_rank()
        shared = everyone if together else None
        self.twin = self.make_twin(plain, everyone.size(), units, precision=precision, replicas=replicas, group=shared)
        self.model = ShardLite(module, group=group, units=units, precision=precision, **options)
        chosen = recipe if isinstance(recipe, Recipe) else RECIPES[recipe]
        self.optimizer = chosen.make(self.model.parameters())
        self._theirs = (chosen.twin or chosen.make)(self.twin.masters.values())
        self._steps = 0
        self._shares = options.get("buffers", "rank0") == "rank0"
        self._keeps = replicas > 1

    def step(self, loss: Loss, modes: Sequence[str] = ("step",), clip: float | None = None) -> None:
        """Run one backward per mode ("local" and "sharded" are kinds of `no_sync`), clip, step, and compare."""
        self.backward(loss, modes)
        self.finish(clip)

    def finish(self, clip: float | None = None) -> None:
        """Clip, step, and compare gradients, weights and buffers, after the backwards of a step."""
        if clip is not None:
            same_bits(self._what("norm"), self.model.clip_grad_norm_(clip), self.twin.clip_grad_norm(clip))
        self._compare("gradient", lambda tensor: tensor.grad)
        for optimizer in (self.optimizer, self._theirs):
            take_step(optimizer)
        self._compare_states()
        self._steps += 1

    def evaluate(self, run: Callable[[Callable[..., Any], Turn], Tensor]) -> None:
        """Compare what a run without gradients gives in evaluation mode."""
        turn, outputs = Turn(self._steps, self.rank, 0), []
        self._share_buffers()
        self.twin.refresh()
        with torch.no_grad(), self.twin.as_rank(self.rank):
            for model, module in ((self.model, self.model.module), (self.twin, self.twin.module)):
                module.eval()
                outputs.append(run(model, turn))
                module.train()
        same_bits(self._what("output in evaluation"), *outputs)
        self._compare_buffers()

    def backward(self, loss: Loss, modes: Sequence[str]) -> None:
        """Run the backwards only, on both sides."""
        expected: list[Tensor] = []
        for micros in _reduced_together(modes):
            self._share_buffers()
            self._due = modes[micros[-1]] == "step"
            run = self.twin.keep if self._keeps and not self._due else self.twin.backward
            results = run(lambda _, rank, m=micros: [self._run(loss, self.twin, rank, i) for i in m])
            expected += results[self.rank]
        for micro, (mode, theirs) in enumerate(zip(modes, expected, strict=True)):
            with accumulating(self.model, mode):
                ours = self._run(loss, self.model, self.rank, micro)
            same_bits(self._what(f"loss {micro}"), ours, theirs)

    def _share_buffers(self) -> None:
        if self._due and self._shares:
            self.twin.share_buffers()
        self._due = False

    def _run(self, loss: Loss, model: Callable[..., Any], rank: int, micro: int) -> Tensor:
        value = loss(model, Turn(self._steps, rank, micro))
        value.backward()
        return value.detach()

    def _compare(self, what: str, view: Callable[[Tensor], Tensor | None]) -> None:
        whole = {name: value for name, master in self.twin.masters.items() if (value := view(master)) is not None}
        expected = local_parts(self.model, whole)
        for name, shard in self.model.named_parameters():
            got = view(shard)
            assert (got is not None) == (name in expected), f"{self._what(what)} of {name!r}: {got=}"
            if got is not None:
                same_bits(f"{self._what(what)} of {name!r}", got, expected[name])

    def _compare_states(self) -> None:
        """Compare weights and buffers after a step."""
        self._compare("weight", lambda tensor: tensor.detach())
        self._compare_buffers()

    def _compare_buffers(self) -> None:
        ours = dict(self.model.named_buffers())
        with self.twin.as_rank(self.rank):
            for name, buffer in self.twin.module.named_buffers():
                same_bits(self._what(f"buffer {name!r}"), ours[name], buffer)

    def _what(self, what: str) -> str:
        return f"stage {self.model.stage}, step {self._steps}: {what}"


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def trained(make: Callable[[], nn.Module], loss: Loss, group: Any, **options: Any) -> Pair:
    """Return a pair after some steps, with accumulation and clipping."""
    pair = Pair(make, group, **options)
    pair.step(loss)
    pair.step(loss, ("local", "step"), clip=0.01)
    return pair


def take_step(optimizer: Optimizer, loss: Tensor | None = None) -> None:
    """Run the backward of `loss`, if there is one; step, and clear the gradients."""
    if loss is not None:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulating(model: ShardLite, mode: str) -> AbstractContextManager[None]:
    """Return the context for a backward: `no_sync()` if "local", its sharded kind if "sharded", none if "step"."""
    return nullcontext() if mode == "step" else model.no_sync(sharded=mode == "sharded")


def _reduced_together(modes: Sequence[str]) -> Iterator[range]:
    """Yield the places of backwards that end up in one reduction: only "local" ones wait for the next."""
    first = 0
    for place, mode in enumerate(modes):
        if mode != "local":
            yield range(first, place + 1)
            first = place + 1
    assert first == len(modes), "the last backward must be reduced"
