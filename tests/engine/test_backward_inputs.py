"""Backwards that are limited to some inputs, by shards or by the module's own parameters."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardlite import LayoutError, Precision, ShardLite
from tests.support.models.residual import WIDTH, Block, net
from tests.support.twins.sharded import Turn, same_bits, same_states, take_step


def pair(group: Any, stage: int) -> tuple[ShardLite, nn.Module]:
    torch.manual_seed(0)
    module, twin = net(), net()
    twin.load_state_dict(module.state_dict())
    return ShardLite(module, group=group, stage=stage, units=Block), twin


def loss(model: nn.Module, step: int = 0) -> Tensor:
    return model(torch.randn(3, WIDTH, generator=Turn(step, dist.get_rank(), 0).generator())).square().mean()


def averaged(twin: nn.Module, group: Any) -> dict[str, Tensor | None]:
    for param in twin.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()
    return {name: param.grad for name, param in twin.named_parameters()}


@pytest.mark.stages(0, 2, 3)
@pytest.mark.parametrize("of", ["shards", "parameters"])
def test_gradients_of_the_given_inputs_only(group: Any, stage: int, of: str) -> None:
    """The same as DDP, in any step, and the other parameters get no gradients."""
    model, twin = pair(group, stage)
    for step in range(5):  # shards are watched in the first steps only
        model.zero_grad()
        twin.zero_grad()
        ours = model if of == "shards" else model.module
        chosen = [param for name, param in ours.named_parameters() if name.startswith("1.")]
        loss(model, step).backward(inputs=chosen)
        loss(twin, step).backward(inputs=list(twin[1].parameters()))
        for name, expected in averaged(twin, group).items():
            if expected is None:
                assert dict(model.named_parameters())[name].grad is None
            else:
                same_bits(name, model.full_grad(name), expected)
        torch.optim.SGD(model.parameters(), lr=0.0).step()


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("options", [{}, {"allow_unused": True}, {"materialize_grads": True}])
def test_gradients_of_shards_are_refused_in_any_step(group: Any, stage: int, options: dict[str, bool]) -> None:
    model, twin = pair(group, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(5):
        with pytest.raises(LayoutError, match=r"shards are not in autograd's graph.*`model\.module\.parameters\(\)`"):
            torch.autograd.grad(loss(model, step), list(model.parameters()), **options)
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    remedy = torch.autograd.grad(loss(model), list(model.module.parameters()), **options)
    for got, expected in zip(remedy, torch.autograd.grad(loss(twin), list(twin.parameters())), strict=True):
        same_bits("this rank's", got, expected)


@pytest.mark.stages(3)
def test_a_hook_in_a_limited_backward_may_read_weights(group: Any, stage: int) -> None:
    model, twin = pair(group, stage)
    seen: list[Tensor] = []
    last = model.module[2].inner.weight
    out = model(torch.ones(2, WIDTH))
    out.register_hook(lambda _: seen.append(last.sum()))
    out.sum().backward(inputs=list(model.module.parameters()))
    same_bits("a weight", seen[0].detach(), twin[2].inner.weight.sum().detach())


@pytest.mark.stages(2, 3)
def test_hooks_on_several_gradients(group: Any, stage: int) -> None:
    """On shards they are refused, on the module's own parameters they see this rank's gradients."""
    model, twin = pair(group, stage)
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), seen.append)
    with pytest.raises(LayoutError, match=r"has a hook, which would never run.* register it on the module's own"):
        loss(model)
    handle.remove()
    torch.autograd.graph.register_multi_grad_hook(list(model.module.parameters()), seen.extend)
    loss(model).backward()
    loss(twin).backward()
    for got, param in zip(seen, twin.parameters(), strict=True):
        same_bits("this rank's", got, param.grad)


@pytest.mark.stages(3)
def test_compiled_autograd_is_refused(group: Any, stage: int) -> None:
    import torch._dynamo.compiled_autograd as compiled

    model, _ = pair(group, stage)
    result = loss(model)
    with (
        warnings.catch_warnings(action="ignore"),  # the compiler reads `.grad` of tensors that are no leaves
        pytest.raises(LayoutError, match=r"run the backward without it \(torch\._dynamo\.config\.compiled_autograd"),
        compiled._enable(torch.compile(backend="eager")),
    ):
        result.backward()
    loss(model).backward()
    assert all(shard.grad is not None for shard in model.parameters())


def test_calls_of_ddp_name_their_equivalents(group: Any) -> None:
    model, _ = pair(group, 3)
    with pytest.raises(TypeError, match=r"for batch in model\.join\(batches\)"):
        model.join()
    assert list(model.join([1])) == [1]


@pytest.mark.stages(0, 2, 3)
def test_gradients_in_another_dtype_are_those_of_the_hook(group: Any, stage: int) -> None:
    """Both round gradients to fp16, to 11 bits or a multiple of 2^-24. DDP rounds their mean too."""
    model, twin = pair(group, stage)
    with pytest.raises(AttributeError, match=r"travel in another dtype use Precision\(reduce=\.\.\.\)"):
        model.register_comm_hook(None, fp16_compress_hook)
    ddp, alone = DistributedDataParallel(copy.deepcopy(twin), process_group=group), copy.deepcopy(twin)
    ddp.register_comm_hook(group, fp16_compress_hook)
    remedied = ShardLite(twin, group=group, stage=stage, units=Block, precision=Precision(reduce=torch.float16))
    for each in (ddp, alone, remedied):
        loss(each).backward()
    sizes = {name: param.grad.abs() for name, param in alone.named_parameters()}
    for (name, exact), param in zip(averaged(alone, group).items(), ddp.parameters(), strict=True):
        dist.all_reduce(sizes[name], group=group)
        got, rounding = remedied.full_grad(name), sizes[name] / group.size() * 2**-11 + 2**-25
        assert bool(((got - exact).abs() <= rounding).all())
        assert bool(((got - param.grad).abs() <= 3 * rounding).all())
        assert not torch.equal(got, exact), "nothing was rounded"


class Recurrent(nn.Module):
    """Its first block runs twice, in reentrant checkpoints: DDP refuses this unless its graph is declared static."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = net(2)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[0], self.blocks[1]):
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pytest.mark.stages(0, 2, 3)
def test_a_static_graph_needs_no_call(group: Any, stage: int) -> None:
    torch.manual_seed(0)
    module, twin = Recurrent(), Recurrent()
    twin.load_state_dict(module.state_dict())
    model = ShardLite(module, group=group, stage=stage, units=Block)
    with pytest.raises(AttributeError, match="remove the call, because any graph may change"):
        model._set_static_graph()
    ddp = DistributedDataParallel(twin, process_group=group)
    ddp._set_static_graph()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ddp)]
    for step in range(2):
        for each, optimizer in zip((model, ddp), optimizers, strict=True):
            x = torch.randn(3, WIDTH, generator=Turn(step, dist.get_rank(), 0).generator()).requires_grad_()
            take_step(optimizer, each(x).square().mean())
    same_states("after two steps", model.full_state_dict(), twin.state_dict())
