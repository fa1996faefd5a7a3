"""What the optimizer tests share: parameters as `ShardLite` lays them out, plain ones, and their gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
NUMELS = [100, 32, 1, 0, 500, 33]


@dataclass
class Arena:
    """Parameters in one padded buffer and their gradients in another, as `ShardLite` lays them out."""

    flat: Tensor
    flat_grad: Tensor
    params: list[nn.Parameter]

    def new_grads(self, seed: int) -> None:
        """Fresh gradients in a fresh buffer, with zeros between them."""
        self.flat_grad = torch.zeros_like(self.flat)
        generator = torch.Generator().manual_seed(seed)
        for param in self.params:
            here = slice(param.storage_offset(), param.storage_offset() + param.numel())
            self.flat_grad[here] = torch.randn(param.numel(), generator=generator)
            param.grad = self.flat_grad[here].view(param.shape)


def make_arena(numels=NUMELS, dtype=torch.float32) -> Arena:
    torch.manual_seed(0)
    offsets = [0]
    for numel in numels:
        offsets.append(offsets[-1] + -(-numel // 32) * 32)
    flat, params = torch.zeros(-(-offsets[-1] // 1024) * 1024, dtype=dtype), []
    for numel, offset in zip(numels, offsets, strict=False):
        flat[offset : offset + numel].normal_()
        # Through `.data` each parameter gets a version counter of its own.
        params.append(nn.Parameter(flat.data[offset : offset + numel].view(numel, 1)))
    arena = Arena(flat, flat, params)
    arena.new_grads(seed=0)
    return arena


def fused_twin(arena):
    """PyTorch's fused optimizer on the whole padded buffer as one parameter."""
    twin = nn.Parameter(arena.flat.clone())
    return twin, torch.optim.AdamW([twin], **HYPER, fused=True)


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


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
