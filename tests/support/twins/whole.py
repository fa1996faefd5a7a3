"""Optimizers that need whole parameters, and the recipes that train them in shards and on a plain twin."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardlite import WholeParameters
from tests.support.twins.plain import PaddedAdamW, Recipe
from tests.support.twins.split import cut


class Norms(optim.Optimizer):
    """A step of the length of its parameter, along momentum; a group counts the steps, and a state has all kinds."""

    def __init__(self, params: Any, lr: Any = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)
        return loss

    def _step(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state |= {"count": 0, "momentum": torch.zeros_like(param), "kept": [torch.zeros(1), None], "name": "a"}
        state["count"] += 1
        state["kept"][0] += param.norm()
        state["momentum"].mul_(group["momentum"]).add_(param.grad)
        length = (param.norm() + 0.1) / (state["momentum"].norm() + 1e-6)
        param.sub_(state["momentum"] * length, alpha=float(group["lr"]) / (1 + 0.1 * group["steps"]))


class CutNorms(Norms):
    """The same, with weights that are cut to 24 bits after each step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for param in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            param.copy_(cut(param))
        return loss


class Several(optim.Optimizer):
    """Several optimizers as one: what a program has where matrices are stepped otherwise than the rest."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad()


MATRICES = {"lr": 0.02, "weight_decay": 0.1}
REST = {"lr": 0.01, "weight_decay": 0.1}


def whole(kind: type[optim.Optimizer], **options: Any) -> Callable[..., WholeParameters]:
    return lambda params: WholeParameters(params, kind, **options)


def muon_and_adamw(params: Iterable[nn.Parameter]) -> Several:
    """Step matrices by Muon, and the rest by AdamW as shards are stepped."""
    params = list(params)
    matrices, rest = ([p for p in params if (p.ndim == 2) is wanted] for wanted in (True, False))
    return Several(optim.Muon(matrices, **MATRICES), PaddedAdamW(rest, **REST))


def sharded_muon(params: Iterable[nn.Parameter], **options: Any) -> WholeParameters:
    is_matrix = lambda _, shape: len(shape) == 2  # noqa: E731
    return WholeParameters(params, optim.Muon, whole=is_matrix, elementwise=REST, **MATRICES, **options)


WHOLE = {
    "norms": Recipe(whole(Norms, lr=0.02), lambda p: Norms(p, lr=0.02)),
    "adafactor": Recipe(whole(optim.Adafactor, lr=0.02), lambda p: optim.Adafactor(p, lr=0.02)),
    "muon": Recipe(sharded_muon, muon_and_adamw),
}
