"""Weights read outside the modules that own them, as in common libraries, have the bits of the twin."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from shardlite import ShardLite
from shardlite.params import Placeholder
from tests.support.internals import units
from tests.support.models.residual import WIDTH, Block
from tests.support.models.small import run_all
from tests.support.twins.sharded import Pair, Turn, trained

WORDS = 200
UNITS = (Block, nn.Embedding, nn.Linear)
"""Every layer that a parent reads is a unit of its own."""


class Trunk(nn.Module):
    """The layers before the part under test."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def body(self, words: Tensor) -> Tensor:
        return run_all(self.blocks, self.table(words))

    def forward(self, words: Tensor) -> Tensor:
        return self.body(words)


class AttentionPool(Trunk):
    """CLIP's: `multi_head_attention_forward` is given the weights of children that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.body(words).transpose(0, 1)
        pooled, _ = functional.multi_head_attention_forward(
            *(x.mean(0, keepdim=True), x, x, WIDTH, 4, None),
            torch.cat([self.query.bias, self.key.bias, self.value.bias]),
            *(None, None, False, 0.0, self.out.weight, self.out.bias),
            use_separate_proj_weight=True,
            q_proj_weight=self.query.weight,
            k_proj_weight=self.key.weight,
            v_proj_weight=self.value.weight,
        )
        return pooled


class SharedTable(Trunk):
    """The head is the table of the embedding, read by the parent (openai-whisper, OLMo)."""

    def forward(self, words: Tensor) -> Tensor:
        return self.body(words) @ self.table.weight.T


class ReadsAnother(Trunk):
    """A block reads a weight of the one before, and rows of the embedding are read instead of calling it."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.table.weight[words]
        for i, block in enumerate(self.blocks):
            x = block(x) + functional.linear(x, self.blocks[i - 1].inner.weight)
        return x


class WeightNormedHead(Trunk):
    """The weight of the head is computed from two parameters when its parent reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = weight_norm(nn.Linear(WIDTH, WORDS, bias=False))

    def forward(self, words: Tensor) -> Tensor:
        return functional.linear(self.body(words), self.head.weight)


class Lists(Trunk):
    """A ParameterList, and a list of layers whose weights are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))

    def forward(self, words: Tensor) -> Tensor:
        x = self.body(words)
        for scale in self.scales:
            x = x * scale
        return torch.einsum("bsi,hoi->bsho", x, torch.stack([head.weight for head in self.heads]))


class Orthogonal(Trunk):
    """AdaLoRA's: an outer forward adds a penalty on weights of inner layers, found by name."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.body(words)
        penalties = [
            (p @ p.T - torch.eye(len(p))).norm() for name, p in self.named_parameters() if "inner.weight" in name
        ]
        return x + 0.1 * torch.stack(penalties).mean()


class TensorHook(Trunk):
    """A hook on an activation reads the weight of a block that backward has yet to come to, and of the table."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.body(words)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (1 + self.blocks[0].inner.weight.mean() + self.table.weight.mean()))
        return x


class BackwardHook(Trunk):
    """Hooks for a module's backward read the weights of the module, and of another one."""

    def __init__(self) -> None:
        super().__init__()
        block, other = self.blocks
        block.register_full_backward_hook(lambda m, into, out: tuple(g * (1 + m.inner.weight.mean()) for g in into))
        other.register_full_backward_pre_hook(lambda m, out: tuple(g * (1 + block.inner.weight.mean()) for g in out))


def on_words(model: Any, turn: Turn) -> Tensor:
    words = torch.randint(WORDS, (4, 3), generator=turn.generator())
    return model(words).logsumexp(-1).mean()


MODELS = (AttentionPool, WeightNormedHead, Lists, SharedTable, ReadsAnother, Orthogonal, TensorHook, BackwardHook)


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.sample(2)
def test_programs_that_read_weights(group: Any, make: Any, stage: int) -> None:
    trained(make, on_words, group, stage=stage, units=UNITS)


# ---- hooks that are registered after wrapping ------------------------------------------------------------------------


def before_block(module: Trunk) -> None:
    module.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] * m.inner.weight.mean(),))


def after_block(module: Trunk) -> None:
    module.blocks[0].register_forward_hook(lambda m, args, out: out * m.inner.weight.mean())


def before_all(module: Trunk) -> None:
    module.register_forward_pre_hook(lambda m, args: (args[0] + int(m.blocks[0].inner.weight.mean() > 9),))


def after_all(module: Trunk) -> None:
    module.register_forward_hook(lambda m, args, out: out * m.blocks[0].inner.weight.mean() + m.table.weight[0])


HOOKS = (before_block, after_block, before_all, after_all)


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_registered_after_wrapping(group: Any, register: Callable[[Trunk], None], stage: int) -> None:
    pair = Pair(Trunk, group, stage=stage, units=UNITS)
    for each in (pair.model, pair.twin):
        register(each.module)
    for _ in range(3):
        pair.step(on_words)


@pytest.mark.stages(1, 3)
def test_hooks_of_the_wrapper(group: Any, stage: int) -> None:
    """Hooks of the wrapper itself run around its forward."""
    pair = Pair(Trunk, group, stage=stage, units=UNITS)
    for each in (pair.model, pair.twin.module):
        trunk = pair.model.module if each is pair.model else each
        each.register_forward_hook(lambda _, args, out, m=trunk: out * m.blocks[0].inner.weight.mean())
        each.register_forward_pre_hook(lambda _, args, m=trunk: (args[0] + int(m.table.weight.mean() > 9),))
    for _ in range(3):
        pair.step(on_words)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self(x, times - 1) if times else x
        return x * self.weight


def test_a_module_that_calls_itself_is_resharded_when_its_outermost_call_ends(group: Any) -> None:
    model = ShardLite(nn.Sequential(Recursive(), Recursive()), units=Recursive, group=group)
    model.trace.take()
    model(torch.ones(2, WIDTH))
    events = [event for event in model.trace.take() if event.startswith("reshard")]
    assert events == ["reshard 0", "reshard 1"]


# ---- in a backward, where handles need no parameters -----------------------------------------------------------------


class TwoLayers(nn.Module):
    """A unit whose handles are not all gone when a gradient of its second layer comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_parameters_stay_placeholders_in_a_backward_until_one_is_read(group: Any) -> None:
    """Compare before a hook reads the parameter, then, and at the end."""
    model = ShardLite(nn.Sequential(TwoLayers(), TwoLayers()), units=TwoLayers, group=group)
    seen: list[bool] = []
    users: list[int] = []
    weight = model.module[1].second.inner.weight
    (unit,) = (each for each in units(model) if weight in set(each.params()))

    def note() -> None:
        seen.append(isinstance(weight, Placeholder))
        users.append(unit.users)

    def look(grad: Tensor) -> None:
        note()
        assert weight.isfinite().all()
        note()

    weight.register_hook(look)
    model(torch.ones(2, WIDTH)).sum().backward()
    note()
    assert seen == [True, False, True]
    assert users == [1, 1, 0]  # the handles: a hook does not hold a unit that is there
