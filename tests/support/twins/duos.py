"""Train a model twice on the same ranks: with the ordinary AdamW step, and with the step in the backward."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardlite import AdamW, ShardLite
from tests.support.internals import units
from tests.support.twins.sharded import Loss, Turn, _seeded, accumulating, same_bits, same_states

Schedule = Callable[[optim.Optimizer], Any]
Ranks = Callable[[Iterable[nn.Parameter]], Any]


class Side:
    """One of the two models, with its optimizer."""

    def __init__(
        self,
        model: ShardLite,
        *,
        in_backward: bool,
        groups: Ranks = list,
        schedule: Schedule | None = None,
        lr: Callable[[], Any] = lambda: 0.02,
        **options: Any,
    ) -> None:
        self.model = model
        params = groups(model.parameters())
        self.optimizer = AdamW(params, lr=lr(), weight_decay=0.1, in_backward=in_backward, **options)
        self._scheduler = schedule(self.optimizer) if schedule else None

    def backward(self, loss: Loss, turns: Sequence[Turn], modes: Sequence[str]) -> None:
        for turn, mode in zip(turns, modes, strict=True):
            with accumulating(self.model, mode):
                loss(self.model, turn).backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> dict[str, Tensor]:
        """Everything that must be equal, by a name."""
        found = {f"shard of {name!r}": shard.detach() for name, shard in self.model.named_parameters()}
        for name, shard in self.model.named_parameters():
            for key, value in self.optimizer.state.get(shard, {}).items():
                found[f"{key} of {name!r}"] = value
        for unit in units(self.model):
            for i, flat in enumerate(unit.flats):
                if flat.low is not None:
                    found[f"lower part of unit {unit.name!r}, flat {i}"] = flat.low
        return found


class Duo:
    """Two models that must have the same bits after every step.

    `options` are those of `ShardLite`, `optimizer` those of a `Side`; `ignored` chooses in a module what is left alone.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        group: Any,
        *,
        optimizer: dict[str, Any] | None = None,
        ignored: Callable[[Any], Iterable[nn.Module]] = lambda module: (),
        **options: Any,
    ) -> None:
        self.rank = torch.distributed.get_rank()
        self.steps = 0
        modules = [_seeded(make) for _ in range(2)]
        self.sides = [
            Side(
                ShardLite(module, group=group, ignore=ignored(module), **options), in_backward=flag, **(optimizer or {})
            )
            for module, flag in zip(modules, (False, True), strict=True)
        ]
        self.ordinary, self.inside = self.sides

    def step(self, loss: Loss, modes: Sequence[str] = ("step",)) -> None:
        """One step of both, with backwards in these modes; see `tests.support.twins.sharded.Pair`."""
        self.backward(loss, modes)
        self.finish()

    def backward(self, loss: Loss, modes: Sequence[str] = ("step",)) -> None:
        turns = [Turn(self.steps, self.rank, micro) for micro in range(len(modes))]
        for side in self.sides:
            torch.manual_seed(self.steps)
            side.backward(loss, turns, modes)
        if modes[-1] == "step":
            for name, shard in self.inside.model.named_parameters():
                assert shard.grad is None, f"step {self.steps}: {name!r} has a gradient"

    def finish(self) -> None:
        for side in self.sides:
            side.finish()
        self.compare()
        self.steps += 1

    def compare(self) -> None:
        expected, got = (side.state() for side in self.sides)
        assert not expected.keys() - got.keys()
        for name in got.keys() - expected.keys():  # a step that may come in the backward needs room before it is known
            assert not got[name].any(), f"{name} of a parameter that was never stepped"
        for name, value in expected.items():
            where = f"stage {self.inside.model.stage}, step {self.steps}: {name}"
            if "exponent" in name or value.dtype in (torch.int8, torch.uint8):
                assert torch.equal(got[name], value), where
            else:
                same_bits(where, got[name], value)

    def full(self) -> None:
        """Compare whole state dicts."""
        expected, got = (side.model.full_state_dict() for side in self.sides)
        same_states("state", got, expected)


def alike(
    make: Callable[[], nn.Module],
    loss: Loss,
    group: Any,
    *,
    stages: Iterable[int] = (0, 1, 2, 3),
    modes: Sequence[Sequence[str]] = (("step",), ("local", "step"), ("step",)),
    **options: Any,
) -> Duo:
    """Train at each stage, a step for each of `modes`; return the last duo."""
    duos = []
    for stage in stages:
        duo = Duo(make, group, stage=stage, **options)
        for each in modes:
            duo.step(loss, each)
        duo.full()
        duos.append(duo)
    return duos[-1]
