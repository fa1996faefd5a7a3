"""What the optimizer tests share: shards as `ShardLite` lays them out, plain parameters, and their gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardlite.params.layout import ShardInfo, mark_padded

HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
NUMELS = [100, 32, 1, 0, 500, 33]


@dataclass
class Arena:
    """Parameters in one padded buffer and their gradients in another, as `ShardLite` lays them out."""

    flat: Tensor
    flat_grad: Tensor
    params: list[nn.Parameter]

    def new_grads(self, seed: int) -> None:
        """Fresh gradients in a fresh buffer, with zeros between them, and NaN where nothing is ours."""
        self.flat_grad = torch.zeros_like(self.flat).masked_fill(self.flat.isnan(), float("nan"))
        generator = torch.Generator().manual_seed(seed)
        for param in self.params:
            here = slice(param.storage_offset(), param.storage_offset() + param.numel())
            self.flat_grad[here] = torch.randn(param.numel(), generator=generator)
            (param.grad,) = mark_padded([self.flat_grad[here].view(param.shape)])


def padded_numel(numel: int) -> int:
    return -(-numel // 32) * 32


def make_arena(numels=NUMELS, dtype=torch.float32, gaps=()) -> Arena:
    """`gaps` are how many elements that are not ours, all NaN, lie behind each parameter."""
    torch.manual_seed(0)
    offsets, gaps = [0], [*gaps, *[0] * len(numels)]
    for numel, gap in zip(numels, gaps, strict=False):
        offsets.append(offsets[-1] + padded_numel(numel) + gap)
    flat, params = torch.zeros(-(-offsets[-1] // 1024) * 1024, dtype=dtype), []
    for numel, gap, offset in zip(numels, gaps, offsets, strict=False):
        flat[offset : offset + numel].normal_()
        flat[offset + padded_numel(numel) :][:gap] = float("nan")
        # Through `.data` each parameter gets a version counter of its own.
        params.append(nn.Parameter(flat.data[offset : offset + numel].view(numel, 1)))
        ShardInfo(0, None).mark(params[-1])
    arena = Arena(flat, flat, params)
    arena.new_grads(seed=0)
    return arena


def fused_twin(arena):
    """PyTorch's fused optimizer on the whole padded buffer as one parameter."""
    twin = nn.Parameter(arena.flat.clone())
    return twin, torch.optim.AdamW([twin], **HYPER, fused=True)


class PaddedTwins:
    """PyTorch's fused optimizer on a flat, zero-padded copy of each parameter."""

    def __init__(self, params):
        self._params = params
        self.flats = [nn.Parameter(padded(param)) for param in params]
        self.optimizer = torch.optim.AdamW(self.flats, **HYPER, fused=True)

    def take_grads(self):
        for param, flat in zip(self._params, self.flats, strict=True):
            flat.grad = None if param.grad is None else padded(param.grad)

    def assert_same(self):
        for param, flat in zip(self._params, self.flats, strict=True):
            assert_same(param.data.flatten(), flat.data[: param.numel()])

    def assert_same_grads(self):
        for param, flat in zip(self._params, self.flats, strict=True):
            assert_same(param.grad.flatten(), flat.grad[: param.numel()])

    def assert_same_states(self, optimizer):
        """A parameter without a state has not been stepped."""
        for param, flat in zip(self._params, self.flats, strict=True):
            mine, theirs = optimizer.state.get(param), self.optimizer.state.get(flat)
            assert bool(mine) == bool(theirs)
            if mine:
                assert_same(mine["step"], theirs["step"])
                for name in ("exp_avg", "exp_avg_sq"):
                    assert_same(mine[name].flatten(), theirs[name][: param.numel()])


def padded(tensor):
    flat = torch.zeros(padded_numel(tensor.numel()), dtype=tensor.dtype)
    flat[: tensor.numel()] = tensor.detach().flatten()
    return flat


def run(arena, optimizer, steps, twin=None, twin_optimizer=None):
    for seed in range(steps):
        arena.new_grads(seed)
        optimizer.step()
        if twin is not None:
            twin.grad = arena.flat_grad.clone()
            twin_optimizer.step()


def plain_params():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in [(5, 7), (33,), (), (0, 3), (4, 4, 4)]]


def place_shards(params):
    """Move parameters into one padded buffer and mark them, as wrapping does on one rank."""
    flat, offset = torch.zeros(sum(padded_numel(param.numel()) for param in params), device=params[0].device), 0
    for param in params:
        flat[offset : offset + param.numel()] = param.detach().flatten()
        param.data = flat.data[offset : offset + param.numel()].view(param.shape)
        ShardInfo(0, None).mark(param)
        offset += padded_numel(param.numel())
    return params


def shard_params():
    return place_shards(plain_params())


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def small_model():
    """A model as it is wrapped on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
    place_shards(list(model.parameters()))
    return model


def loss_of(model, seed):
    return model(torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))).square().sum()


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
