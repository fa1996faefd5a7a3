"""`Precision(keep=...)`: kept modules have the bits of a plain model in which the same modules are cast by hand."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardlite
from shardlite import AdamW, LayoutError, MemoryLimit, Precision, ShardLite
from tests.support.internals import flats
from tests.support.models.losses import BF16
from tests.support.twins.sharded import Pair, Turn, local_parts, same_bits, same_states, some_stages

WIDE, NARROW = torch.float32, torch.bfloat16


class Router(nn.Module):
    """A router that leaves casts to others, as most do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(3, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.gate).softmax(-1)


class Block(nn.Module):
    """Experts, a router between them whose fp32 output meets the narrow ones, and layers of PyTorch behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.body = nn.LayerNorm(8), Router(), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights = self.router(normed)
        mixed = sum(weights[..., i : i + 1] * body(normed) for i, body in enumerate(self.body))
        return x + self.out(mixed)


class Net(nn.Module):
    """Blocks whose class repeats. `again` calls the first block twice, `saves` recomputes each."""

    def __init__(self, again: bool = False, saves: bool | None = None) -> None:
        super().__init__()
        self.inp, self.blocks, self.head = nn.Linear(7, 8), nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 4)
        self.again, self.saves = again, saves

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (*self.blocks, *self.blocks[: int(self.again)]):
            x = block(x) if self.saves is None else checkpoint(block, x, use_reentrant=self.saves)
        return self.head(x)


class Declares(Net):
    """A model that declares what to keep: a parameter, and layers."""

    _keep_in_fp32_modules = ("gate", "absent")
    _keep_in_fp32_modules_strict = ("blocks.*.out",)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # like the models that declare, this one casts for its own functions
            block.router.forward = lambda h, r=block.router: functional.linear(h.to(r.gate.dtype), r.gate).softmax(-1)
        return super().forward(x)


def conv() -> nn.Module:
    """Norms with running statistics: of batches, and one that PyTorch calls an instance norm."""
    norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    layers = [nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1), norm, nn.Conv2d(6, 2, 1)]
    return nn.Sequential(*layers)


def frozen_router() -> nn.Module:
    net = Net()
    net.blocks.get_submodule("0.router").requires_grad_(False)
    return net


def of_time(name: str, module: nn.Module) -> torch.dtype | None:
    """Compute in fp32 but for the blocks, and in fp32 again in their norms."""
    if isinstance(module, nn.LayerNorm):
        return WIDE
    return NARROW if isinstance(module, Block) else WIDE if name == "" else None


def rows(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randn(5, 7, generator=turn.generator())).float().square().sum()


def images(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randn(3, 1, 2, 4, generator=turn.generator())).float().square().sum()


# ---- bits -----------------------------------------------------------------------------------------------------------

_LAYERS = {"inp": NARROW, "head": NARROW, **{f"blocks.{i}.{n}": NARROW for i in (0, 1) for n in ("body.0", "out")}}
_OTHERS = {f"blocks.{i}.{name}": NARROW for i in (0, 1) for name in ("body.1", "body.2")}
_NORMS = {f"blocks.{i}.norm": NARROW for i in (0, 1)}
_ROUTERS = {f"blocks.{i}.router": WIDE for i in (0, 1)}
_BLOCKS = {f"blocks.{i}": NARROW for i in (0, 1)}
ROUTED = {**_LAYERS, **_OTHERS, **_NORMS, **_BLOCKS, **_ROUTERS}
"""By name, the modules whose inputs are cast if the routers are kept."""

TIMED = {**ROUTED, "inp": WIDE, "head": WIDE, **dict.fromkeys(_NORMS, WIDE), **dict.fromkeys(_ROUTERS, NARROW)}
DECLARED = {**_LAYERS, **_OTHERS, **_NORMS, "blocks.0.out": WIDE, "blocks.1.out": WIDE}

CASES: Mapping[str, tuple[Callable[[], nn.Module], Any, Mapping[str, torch.dtype], tuple[str, ...]]] = {
    "a class": (Net, Router, ROUTED, ("router",)),
    "a name": (Net, ["router"], ROUTED, ("router",)),
    "a parameter's name": (Net, "gate", ROUTED, ("router",)),
    "a function": (Net, of_time, TIMED, ("inp", "head", "norm")),
    "called twice": (lambda: Net(again=True), Router, ROUTED, ("router",)),
    "checkpointed": (lambda: Net(saves=False), Router, ROUTED, ("router",)),
    "checkpointed, reentrant": (lambda: Net(saves=True), Router, ROUTED, ("router",)),
    "frozen": (frozen_router, Router, ROUTED, ("router",)),
    "declared": (Declares, None, DECLARED, ("gate", "out")),
    "nothing": (Declares, (), _LAYERS | _OTHERS | _NORMS | _BLOCKS | dict.fromkeys(_ROUTERS, NARROW), ()),
    "running statistics": (conv, None, {"0": NARROW, "3": NARROW, "5": NARROW}, ("1", "4")),
}
"""By kind: a model, `keep`, the casts of inputs by hand, and the parts of names whose parameters are in fp32."""


class ByHand:
    """A plain model with fp32 masters, whose modules have hooks that cast, trained by SGD on averaged gradients."""

    def __init__(self, module: nn.Module, casts: Mapping[str, torch.dtype], kept: tuple[str, ...]) -> None:
        self.module, self.dtype = module, WIDE if casts.get("inp") is WIDE else NARROW
        self.masters = {name: param.detach().clone() for name, param in module.named_parameters()}
        for name, param in module.named_parameters():
            if not set(kept) & set(name.split(".")):
                param.data = param.data.to(NARROW)
        for name, dtype in casts.items():
            module.get_submodule(name).register_forward_pre_hook(lambda _, args, d=dtype: args[0].to(d))

    def __call__(self, x: Tensor) -> Any:
        return self.module(x.to(self.dtype))

    def step(self, loss: Callable[..., Tensor], turn: Turn) -> Tensor:
        params = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(self.masters[name])
        (value := loss(self, turn)).backward()
        for name, param in params.items():
            if param.grad is not None:
                mean = param.grad.float()
                dist.all_reduce(mean)
                self.masters[name] -= 0.5 * (mean / dist.get_world_size())
                param.grad = None
        return value.detach()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.stages(0, 2, 3)
def test_kept_modules_have_the_bits_of_casts_by_hand(group: Any, stage: int, case: str) -> None:
    make, keep, casts, kept = CASES[case]
    loss = images if case == "running statistics" else rows
    torch.manual_seed(0)
    module = make()
    twin = ByHand(copy.deepcopy(module), casts, kept)
    replicate = [module.blocks[1].router] if case == "a name" else []
    precision = Precision(compute=NARROW, keep=keep)
    model = ShardLite(module, group=group, stage=stage, precision=precision, buffers="own", replicate=replicate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        turn = Turn(step, dist.get_rank(), 0)
        value = loss(model, turn)
        value.backward()
        same_bits("loss", value.detach(), twin.step(loss, turn))
        optimizer.step()
        optimizer.zero_grad()
        same_states(f"step {step}", model.full_state_dict(), twin.module.state_dict() | twin.masters)
    assert {name for name, param in module.named_parameters() if param.dtype == WIDE} == {
        name for name, param in twin.module.named_parameters() if param.dtype == WIDE
    }
