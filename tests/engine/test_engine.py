"""User code with autograd, threads and hooks works, or raises an error with a remedy."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from shardlite import AdamW, LayoutError, ShardLite, WholeParameters
from shardlite.params.parameters import Sharded
from tests.support.models.residual import WIDTH, Block, net
from tests.support.twins.sharded import Turn, same_bits, take_step

WORDS = 200


def wrapped(group: Any, stage: int) -> tuple[ShardLite, nn.Module]:
    """A model and its twin on this rank."""
    torch.manual_seed(0)
    module = net()
    twin = net()
    twin.load_state_dict(module.state_dict())
    return ShardLite(module, group=group, stage=stage, units=Block), twin


def rows(model: nn.Module) -> Tensor:
    return model(torch.randn(3, WIDTH, generator=Turn(0, dist.get_rank(), 0).generator())).square().mean()


# ---- torch.autograd.grad ---------------------------------------------------------------------------------------------


@pytest.mark.stages(1, 3)
def test_gradients_by_weights(group: Any, stage: int) -> None:
    """By the module's own parameters they are this rank's, whole; a backward follows as ever."""
    model, twin = wrapped(group, stage)
    ours = torch.autograd.grad(rows(model), list(model.module.parameters()))
    theirs = torch.autograd.grad(rows(twin), list(twin.parameters()))
    for got, expected in zip(ours, theirs, strict=True):
        same_bits("a gradient", got, expected)
    if stage:
        with pytest.raises(LayoutError, match=r"shards are not in autograd's graph.*`model\.module\.parameters\(\)`"):
            torch.autograd.grad(rows(model), list(model.parameters()))
    model.zero_grad()
    rows(model).backward()
    assert all(shard.grad is not None for shard in model.parameters())


# ---- hooks for accumulated gradients ---------------------------------------------------------------------------------


@pytest.mark.stages(1, 3)
def test_hooks_for_accumulated_gradients(group: Any, stage: int) -> None:
    """Registered after wrapping they see this rank's gradient, before the reduction; on shards they are refused."""
    model, twin = wrapped(group, stage)
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda param: seen.update({name: param.grad.clone()})

    for name, param in model.module.named_parameters():
        param.register_post_accumulate_grad_hook(note(name))
    rows(model).backward()
    rows(twin).backward()
    for name, param in twin.named_parameters():
        same_bits(name, seen[name], param.grad)
    next(model.parameters()).register_post_accumulate_grad_hook(note("a shard"))
    with pytest.raises(LayoutError, match=r"of parameter '0\.inner\.weight' has a hook, which would never run"):
        rows(model)


def by_sgd(model: ShardLite) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def by_adamw(model: ShardLite) -> optim.Optimizer:
    return AdamW(model.parameters(), lr=0.1)


def by_adamw_in_backward(model: ShardLite) -> optim.Optimizer:
    return AdamW(model.parameters(), lr=0.1, in_backward=True)


def by_whole_parameters(model: ShardLite) -> optim.Optimizer:
    return WholeParameters(model.parameters(), optim.SGD, lr=0.1)


@pytest.mark.stages(0, 2, 3)
@pytest.mark.parametrize("make", [by_sgd, by_adamw, by_adamw_in_backward, by_whole_parameters])
def test_a_late_hook_of_a_shard_is_refused_before_weights_change(group: Any, stage: int, make: Any) -> None:
    """Registered between forward and backward. The error comes with the step, and the step works without the hook."""
    model, _ = wrapped(group, stage)
    optimizer = make(model)
    last = list(model.parameters())[-1]
    for register in (last.register_hook, last.register_post_accumulate_grad_hook):
        before = [shard.detach().clone() for shard in model.parameters()]
        loss = rows(model)
        handle = register(lambda _: None)
        with pytest.raises(
            LayoutError, match=r"of parameter '2\.inner\.bias' has a hook.* register it on the module's"
        ):
            take_step(optimizer, loss)
        for shard, value in zip(model.parameters(), before, strict=True):
            same_bits("a shard", shard.detach(), value)
        handle.remove()
        model.zero_grad()
        take_step(optimizer, rows(model))
        assert not all(map(torch.equal, model.parameters(), before))


def double(param: nn.Parameter) -> None:
    if isinstance(param, Sharded):
        with pytest.raises(LayoutError, match=r"or write into the gradient in a hook \(`param\.grad\.copy_"):
            param.grad = param.grad * 2
        param.grad.copy_(param.grad * 2)
    else:
        param.grad = param.grad * 2


def drop(param: nn.Parameter) -> None:
    param.grad = None


def drop_on_rank_1(param: nn.Parameter) -> None:
    if dist.get_rank():
        param.grad = None


@pytest.mark.stages(0, 2, 3)
@pytest.mark.parametrize("wraps_first", [True, False])
def test_hooks_that_change_accumulated_gradients(group: Any, stage: int, wraps_first: bool) -> None:
    """They write to or drop this rank's gradient of any parameter, as in DDP, also if they are older than the model."""
    for hook in (double, drop_on_rank_1, drop):
        torch.manual_seed(0)
        module = net()
        ddp = DistributedDataParallel(copy.deepcopy(module), process_group=group)
        model = ShardLite(module, group=group, stage=stage, units=Block) if wraps_first else None
        for param in (*module.parameters(), *ddp.parameters()):
            param.register_post_accumulate_grad_hook(hook)
        model = model or ShardLite(module, group=group, stage=stage, units=Block)
        for each in (model, ddp):
            with each.no_sync():
                rows(each).backward()
            rows(each).backward()
        for name, param in ddp.module.named_parameters():
            if hook is drop:  # DDP counts a parameter without a gradient as zero
                assert dict(model.named_parameters())[name].grad is None
                assert not param.grad.any()
            else:
                same_bits(name, model.full_grad(name), param.grad)


@pytest.mark.stages(1, 3)
def test_optimizers_in_hooks(group: Any, stage: int) -> None:
    """An optimizer for each parameter that steps in a hook (PyTorch's recipe) is told to be another."""
    model, _ = wrapped(group, stage)
    optimizers = {param: optim.SGD([param], lr=0.1) for param in model.module.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.module.parameters():
        param.register_post_accumulate_grad_hook(step)
    with pytest.raises(LayoutError, match=r"SGD holds the unsharded parameter .* build it from `parameters"):
        rows(model).backward()


# ---- sparse gradients ------------------------------------------------------------------------------------------------


@pytest.mark.stages(0, 3)
def test_sparse_adam(group: Any, stage: int) -> None:
    """Each rank steps whole tables, whose gradients are averaged. Only rows that some rank has used are stepped."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=True), Block())
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage, replicate=[plain[0]])
    pairs = [(each, optim.SparseAdam([next(each.parameters())], lr=0.1)) for each in (model, twin)]
    for step in range(4):
        words = torch.randint(0, WORDS // 2, (2, 6), generator=torch.Generator().manual_seed(step))
        for each, optimizer in pairs:
            mine = words[group.rank()] if each is model else words
            take_step(optimizer, each(mine).square().mean())
    torch.testing.assert_close(model.full_state_dict()["0.weight"], twin[0].weight.detach())


@pytest.mark.parametrize("stage", [1, 3])
def test_sparse_adam_of_shards_is_refused(group: Any, stage: int) -> None:
    model = ShardLite(nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=True), Block()), group=group, stage=stage)
    optimizer = optim.SparseAdam([next(model.parameters())])
    model(torch.arange(4)).sum().backward()
    with pytest.raises(LayoutError, match=r"wrap the model with replicate=\[embedding\]"):
        optimizer.step()
    model.zero_grad()
    optimizer = AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()


@pytest.mark.ranks(1)
def test_sparse_adam_of_a_single_rank(group: Any) -> None:
    """One rank has PyTorch's own gradients."""
    model = ShardLite(nn.Embedding(WORDS, WIDTH, sparse=True), group=group)
    optimizer = optim.SparseAdam(list(model.parameters()), lr=0.1)
    before = next(model.parameters()).detach().clone()
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    changed = (next(model.parameters()) != before).any(1)
    assert changed[:4].all()
    assert not changed[4:].any()


# ---- threads ---------------------------------------------------------------------------------------------------------


class Meeting(nn.Module):
    """Stays in its forward until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.inside, self.go = threading.Event(), threading.Event()
        self.go.set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        self.inside.set()
        self.go.wait()
        return x


@pytest.mark.stages(0, 3)
def test_metrics_on_another_thread(group: Any, stage: int) -> None:
    """They read no gradients there, which PyTorch may free meanwhile, and count what the next step finds."""
    model, _ = wrapped(group, stage)
    optimizer = optim.AdamW(model.parameters())
    ended = threading.Event()
    seen: list[Any] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(model.memory())
            model.traffic()

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        rows(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    ended.set()
    thread.join()
    assert seen
    model.ledger.awaits_step = True
    rows(model).backward()
    optimizer.step()
    there: list[Any] = []
    thread = threading.Thread(target=lambda: there.append(model.memory()))
    thread.start()
    thread.join()
    assert there[0]["optimizer state"] == model.memory()["optimizer state"]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.stages(0, 3)
def test_two_threads(group: Any, stage: int, whole: bool) -> None:
    """While one thread is in a forward another is refused, and the first goes on; one after the other they may run."""
    model = ShardLite(Meeting(), group=group, stage=stage, units=Block)
    module, x = model.module, torch.ones(2, WIDTH)
    expected = model(x).detach()
    module.go.clear()
    module.inside.clear()
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(model(x)))
    thread.start()
    module.inside.wait()
    with pytest.raises(LayoutError, match="two threads run one ShardLite model at once"):
        (model if whole else module.net[1])(x)
    with pytest.raises(LayoutError, match="two threads run one ShardLite model at once"):
        model.state_dict()
    module.go.set()
    thread.join()
    same_bits("the first thread's", outputs[0].detach(), expected)
    outputs[0].sum().backward()
    same_bits("later", model(x).detach(), expected)
