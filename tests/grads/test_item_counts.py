"""The divisor of gradients: counts of items, the number of ranks, or none; and what an accumulation keeps in shards.

Legend: `W` ranks, `S` elements per shard of a unit.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from shardlite import AdamW, LayoutError, PhaseError, Precision, Route, ShardLite
from shardlite.params import as_they_are
from tests.support.internals import context
from tests.support.models.residual import WIDTH, net
from tests.support.models.small import Branches, Branching
from tests.support.patience import passes_over
from tests.support.twins.sharded import Turn, accumulating, local_parts, same_bits, same_states, some_stages

MODES = [("step",), ("local", "step"), ("sharded", "sharded", "step"), ("sharded", "local", "step")]


def batch(turn: Turn) -> Tensor:
    """Rows that differ in number from turn to turn; rank 1 sometimes has none."""
    return torch.randn(5 * (turn.rank + turn.micro) % 7, WIDTH, generator=turn.generator())


def loss(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Sum of squares over the rows."""
    return model(batch(turn)).square().sum()


def run(model: ShardLite, modes: Sequence[str], *, step: int = 0, counts: bool = True) -> int:
    """Run one backward per mode, and return the number of rows of all ranks."""
    ranks, rank = context(model).world_size, dist.get_rank()
    for micro, mode in enumerate(modes):
        turn = Turn(step, rank, micro)
        if counts:
            model.count_items(len(batch(turn)) if micro % 2 else torch.tensor(len(batch(turn))))
        with accumulating(model, mode):
            loss(model, turn).backward()
    return sum(len(batch(Turn(step, other, micro))) for other in range(ranks) for micro in range(len(modes)))


def gradients(model: ShardLite) -> dict[str, Tensor]:
    """Return the gradients as plain tensors, which share memory."""
    with as_they_are():
        return {
            name: shard.grad.detach().as_subclass(Tensor)
            for name, shard in model.named_parameters()
            if shard.grad is not None
        }


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_sums_are_divided_once_by_the_total(group: Any) -> None:
    """Compare bits with sums that the test divides, and the norm with that of the quotients."""
    for stage in some_stages(1, 3):
        counted, summed = (ShardLite(net(), stage=stage, group=group) for _ in range(2))
        summed.load_full_state_dict(counted.full_state_dict())
        summed.set_gradient_reduction("sum")
        for modes in MODES:
            total = run(counted, modes)
            run(summed, modes, counts=False)
            expected = {name: grad / total for name, grad in gradients(summed).items()}
            same_states(f"stage {stage}, {modes}", gradients(counted), expected)
            norms = [model.clip_grad_norm_(0.01) for model in (counted, summed)]
            torch.testing.assert_close(norms[0], norms[1] / total, rtol=1e-6, atol=0)
            for model in (counted, summed):
                model.zero_grad()


REDUCED = [("step", "step"), ("step", "local", "step"), ("step", "sharded", "step", "step")]


@pytest.mark.parametrize("modes", REDUCED)
@pytest.mark.parametrize("group", [1, 2, 3], indirect=True)
@pytest.mark.sample(2)
def test_reductions_before_a_step_are_divided_by_one_total(group: Any, modes: tuple[str, ...]) -> None:
    for stage in (0, 3):
        model = ShardLite(net(), group=group, stage=stage)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(2):  # the second total does not have the counts of the first
            items = run(model, modes, step=step)
            got = {name: grad.clone() for name, grad in gradients(model).items()}
            model.zero_grad()
            model.set_gradient_reduction("sum")
            run(model, modes, step=step, counts=False)
            for name, grad in gradients(model).items():
                torch.testing.assert_close(got[name], grad / items, msg=lambda text, n=name: f"{n}: {text}")
            optimizer.step()
            optimizer.zero_grad()
            model.set_gradient_reduction("mean")


@pytest.mark.parametrize("way", ["step", "by hand", "to zero", "to none", "model"])
@pytest.mark.parametrize("group", [1, 2], indirect=True)
@pytest.mark.sample(2)
def test_used_and_dropped_gradients_do_not_count(group: Any, way: str) -> None:
    model = ShardLite(net(), group=group)
    optimizer = SGD(model.parameters(), lr=0.0)
    run(model, ("step",))
    if way == "step":
        optimizer.step()
    if way == "by hand":
        with torch.no_grad():
            for shard in model.parameters():
                shard.sub_(shard.grad, alpha=0.0)
                shard.grad = None if shard.grad.numel() % 2 else shard.grad.zero_()
    (model if way == "model" else optimizer).zero_grad(set_to_none=way != "to zero")
    run(model, ("step",))
    again = ShardLite(net(), group=group)
    again.load_full_state_dict(model.full_state_dict())
    run(again, ("step",))
    for got, expected in zip(gradients(model).values(), gradients(again).values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_backwards_without_a_count_do_not_join_a_total(group: Any) -> None:
    model = ShardLite(net(), group=group)
    run(model, ("step",))
    with pytest.raises(PhaseError, match="but not before this one"):
        run(model, ("step",), counts=False)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("group", [1, 2, 3], indirect=True)
@pytest.mark.sample(2)
def test_gradients_are_those_of_one_batch_with_all_items(group: Any, modes: tuple[str, ...]) -> None:
    """In fp64, on numbers of rows that differ, where means of means are far off.

    The model is linear and so is the loss, `sum(y * t)`. Each element of a gradient is a sum of `n` products. Here a
    product meets 1 rounding of its own, one per addition to other rows, micro-batches and ranks, and 2 of the division:
    its own and that of a part, as one rank divides micro-batches before it adds them. In one batch `t / n` is rounded
    before. So each is at most `k*u/(1 - k*u)` times the sum of absolute values off the exact sum, with `u = 2**-53`
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, 3.1 and 4.2).
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    counts = torch.tensor([[2 + 3 * ((r + m) % 3) for m in range(len(modes))] for r in range(world_size)])
    counts[0, 0] = 11
    generator = torch.Generator().manual_seed(7)
    x = [[torch.randn(n, 7, dtype=torch.float64, generator=generator) for n in row] for row in counts.tolist()]
    t = [[torch.randn(n, 5, dtype=torch.float64, generator=generator) for n in row] for row in counts.tolist()]
    flat_x, flat_t = (torch.cat([each for row in every for each in row]) for every in (x, t))
    total = int(counts.sum())
    module = nn.Linear(7, 5).double()
    names, params = zip(*module.named_parameters(), strict=True)

    def at_once(x: Tensor, t: Tensor) -> dict[str, Tensor]:
        return dict(zip(names, torch.autograd.grad((module(x) * (t / total)).sum(), params), strict=True))

    expected, sizes = at_once(flat_x, flat_t), at_once(flat_x.abs(), flat_t.abs())
    model = ShardLite(module, group=group)
    apart = {}
    for way in ("means", "counts"):
        for micro, mode in enumerate(modes):
            own_x, own_t = x[rank][micro], t[rank][micro]
            y = (model(own_x) * own_t).sum()
            if way == "counts":
                model.count_items(len(own_x))
            with accumulating(model, mode):
                (y if way == "counts" else y / len(own_x) / len(modes)).backward()
        parts, bounds = local_parts(model, expected), local_parts(model, sizes)
        bound = {name: bounds[name] * 2 * (total + len(modes) + world_size + 4) * 2.0**-53 for name in bounds}
        errors = {name: (grad - parts[name]).abs() for name, grad in gradients(model).items()}
        assert errors.keys() == bound.keys()
        apart[way] = max((errors[name] / bound[name]).max().item() if errors[name].numel() else 0.0 for name in bound)
        model.zero_grad()
    assert apart["counts"] <= 1
    assert apart["means"] > 1e6 or len(modes) * world_size == 1


def items(part: int) -> int:
    return (3 * part + 1) % 5


def trained_in_parts(group: Any, optimizer: Callable[..., Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = ShardLite(Branching(), units=Branches, group=group, route=Route(order="tree", parts=8))
    optimizer = optimizer(model.parameters())
    norms = []
    for _ in range(3):
        for part in model.parts():
            x = torch.randn(items(part), 6, generator=torch.Generator().manual_seed(part))
            model.count_items(items(part) + 0.1)
            model(x, part % 2).square().sum().backward()
        if not isinstance(optimizer, AdamW):
            norms.append(model.clip_grad_norm_(0.05))
        optimizer.step()
        optimizer.zero_grad()
    return {**model.full_state_dict(), **{f"norm {i}": norm for i, norm in enumerate(norms)}}


@pytest.mark.ranks(4)
def test_a_tree_gives_the_same_bits_at_any_number_of_ranks(group: Any) -> None:
    """Also with counts that are no integers, and with steps in the backward."""
    pairs, ones = (
        [dist.new_group(list(ranks)) for ranks in each] for each in (((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)))
    )
    rank = dist.get_rank()
    for optimizer in (lambda p: SGD(p, lr=0.1), lambda p: AdamW(p, in_backward=True)):
        expected = trained_in_parts(group, optimizer)
        same_states("two ranks", trained_in_parts(pairs[rank // 2], optimizer), expected)
        same_states("one rank", trained_in_parts(ones[rank], optimizer), expected)


@pytest.mark.ranks(1, 2, 4)
def test_a_tree_sums_parts(group: Any) -> None:
    """The mean of four parts is exactly a quarter of their sum."""
    found = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        model = ShardLite(net(), group=group, route=Route(order="tree", parts=4))
        model.set_gradient_reduction(reduction)
        for part in model.parts(0):
            loss(model, Turn(0, part, 0)).backward()
        found.append(gradients(model))
    mean, total = found
    assert mean.keys() == total.keys()
    assert mean
    for name, grad in mean.items():
        assert not grad.numel() or grad.any()
        same_bits(name, total[name], 4 * grad)


@pytest.mark.ranks(2, 3)
def test_steps_in_the_backward_have_the_bits_of_steps_after_it(group: Any) -> None:
    for stage in some_stages(0, 3):
        states = []
        for in_backward in (True, False):
            torch.manual_seed(0)
            model = ShardLite(net(), stage=stage, group=group)
            optimizer = AdamW(model.parameters(), in_backward=in_backward)
            for step, modes in enumerate(MODES):
                run(model, modes, step=step)
                optimizer.step()
                optimizer.zero_grad()
            states.append(model.full_state_dict())
        same_states(f"stage {stage}", *states)


class OwnCheckpoint(torch.autograd.Function):
    """Reentrant checkpointing as training libraries have written it themselves."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


REENTRANT: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "PyTorch's": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "one's own": OwnCheckpoint.apply,
}


@pytest.mark.parametrize("checkpointing", REENTRANT)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("group", [1], indirect=True)
def test_a_single_rank_divides_too(group: Any, in_backward: bool, checkpointing: str) -> None:
    """With reentrant checkpointing, whose gradients arrive in several graph tasks, and steps."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    plain = copy.deepcopy(module)
    model = ShardLite(module, group=group)
    pair = [AdamW(model.parameters(), in_backward=in_backward), AdamW(plain.parameters())]

    def forward(x: Tensor) -> Tensor:
        first, *layers, last = model.module
        x = first(x)
        for layer in layers:
            x = REENTRANT[checkpointing](layer, x)
        return last(x)

    for step in range(3):
        for micro, mode in enumerate(("local", "step")):
            x = torch.randn(3 + micro, WIDTH, generator=Turn(step, 0, micro).generator()).requires_grad_()
            model.count_items(3 + micro)
            with accumulating(model, mode):
                forward(x).square().sum().backward()
            (plain(x).square().sum() / 7).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.full_state_dict()[name], value, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("group", [2], indirect=True)
def test_a_rank_that_ran_out_counts_nothing(group: Any) -> None:
    torch.manual_seed(0)
    model, rank = ShardLite(net(), group=group), dist.get_rank()
    summed = ShardLite(net(), group=group)
    summed.load_full_state_dict(model.full_state_dict())
    summed.set_gradient_reduction("sum")
    for turn in model.join([Turn(step, rank, 0) for step in range(1 + 2 * rank)]):
        model.count_items(4)
        model(torch.randn(4, WIDTH, generator=turn.generator())).square().sum().backward()
        result = gradients(model)
        model.zero_grad()
    assert turn.step == (2 if rank else 0)
    y = summed(torch.randn(4, WIDTH, generator=Turn(2, 1, 0).generator())).square().sum()
    (y if rank else 0 * y).backward()
    same_states("the last batch", result, {name: grad / 4 for name, grad in gradients(summed).items()})


@pytest.mark.ranks(2)
def test_parameters_that_few_ranks_use(group: Any) -> None:
    """A parameter that only an earlier micro-batch of one rank has used has a gradient on every rank."""
    for sharded in (False, True):
        model = ShardLite(Branching(), units=Branches, group=group)
        rank = dist.get_rank()
        for micro in range(2):
            model.count_items(5)
            with accumulating(model, "step" if micro else "sharded" if sharded else "local"):
                model(torch.ones(5, 6), 1 if (rank, micro) == (1, 0) else None).square().sum().backward()
        used = [name for name in gradients(model) if "branch1" in name]
        unused = [name for name in gradients(model) if "branch0" in name]
        assert used
        assert not unused


@pytest.mark.parametrize("precision", [Precision(reduce=torch.bfloat16), Precision(compute=torch.bfloat16)])
@pytest.mark.ranks(2)
def test_other_dtypes_are_divided_in_the_dtype_of_the_weights(group: Any, precision: Precision) -> None:
    torch.manual_seed(0)
    counted, summed = (ShardLite(net(), group=group, precision=precision) for _ in range(2))
    summed.load_full_state_dict(counted.full_state_dict())
    summed.set_gradient_reduction("sum")
    total = run(counted, ("local", "step"))
    run(summed, ("local", "step"), counts=False)
    same_states("gradients", gradients(counted), {name: grad / total for name, grad in gradients(summed).items()})


@pytest.mark.ranks(2)
def test_scalers_and_bad_gradients_work_as_without_counts(group: Any) -> None:
    model = ShardLite(net(), group=group)
    optimizer = AdamW(model.parameters())
    run(model, ("step",))
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    turn = Turn(0, dist.get_rank(), 0)
    model.count_items(len(batch(turn)))
    scaler.scale(loss(model, turn)).backward()
    scaler.unscale_(optimizer)
    same_states("a power of two changes no bit", gradients(model), expected)
    optimizer.zero_grad()
    before = model.full_state_dict()
    model.count_items(1)
    (model(torch.ones(2, WIDTH)).sum() * (nan if turn.rank else 1.0)).backward()
    with pytest.warns(match="was skipped on all ranks"):
        optimizer.step()
    same_states("a skipped step", model.full_state_dict(), before)


# ---- limits and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_a_total_of_zero_does_not_divide(group: Any) -> None:
    model = ShardLite(net(), group=group)
    model.count_items(0)
    (model(torch.zeros(0, WIDTH)).sum()).backward()
    assert all(grad.eq(0).all() for grad in gradients(model).values())
    assert len(gradients(model)) == 6


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_bad_counts_are_refused(group: Any) -> None:
    model = ShardLite(net(), group=group)
    for bad in (-1, nan, inf, 2.0**42, torch.tensor(-1.0)):
        with pytest.raises(ValueError, match="takes a number from 0"):
            model.count_items(bad)
    for bad in ("3", None, True, torch.ones(2), torch.tensor(True), 1j):
        with pytest.raises(TypeError, match="takes a number or a tensor with one number"):
            model.count_items(bad)
    with pytest.raises(ValueError, match="takes 'mean' or 'sum'"):
        model.set_gradient_reduction("avg")
    model.set_gradient_reduction("sum")
    with pytest.raises(PhaseError, match="gradients are not divided"):
        model.count_items(1)


@pytest.mark.ranks(2)
def test_what_cannot_be_counted_is_refused(group: Any) -> None:
    half = ShardLite(net(), group=group, precision=Precision(compute=torch.bfloat16, reduce=torch.float16))
    with pytest.raises(LayoutError, match="overflow"):
        half.count_items(1)
    model = ShardLite(net(), group=group)
    with model.no_sync():
        loss(model, Turn(0, 1, 0)).backward()
    with pytest.raises(PhaseError, match="accumulated, and not reduced"):
        model.set_gradient_reduction("sum")
    model.zero_grad()
    model.count_items(1)
    with pytest.raises(PhaseError, match="was called for the next backward"):
        model.set_gradient_reduction("sum")
    with model.no_sync(sharded=True):
        loss(model, Turn(0, 1, 0)).backward()
    with pytest.raises(PhaseError, match="accumulated, and not reduced"):
        model.set_gradient_reduction("sum")


@pytest.mark.ranks(2)
def test_a_step_ends_an_accumulation_in_shards(group: Any) -> None:
    model = ShardLite(net(), group=group)
    optimizer = SGD(model.parameters(), lr=0.1)
    for ends in (optimizer.step, optimizer.zero_grad, model.zero_grad):
        run(model, ("sharded",), counts=False)
        ends()
        optimizer.zero_grad()
        run(model, ("step",))
        optimizer.step()
        optimizer.zero_grad()


def forget_on_one_rank(model: ShardLite, rank: int) -> None:
    if rank == 0:
        model.count_items(5)


def forget_one_micro_batch(model: ShardLite, rank: int) -> None:
    with model.no_sync(sharded=True):
        model.count_items(5)
        loss(model, Turn(0, 1, 0)).backward()
    if rank == 0:
        model.count_items(5)


def forget_in_an_accumulation(model: ShardLite, rank: int) -> None:
    with model.no_sync(sharded=True):
        forget_on_one_rank(model, rank)
        loss(model, Turn(0, 1, 0)).backward()


def choose_on_one_rank(model: ShardLite, rank: int) -> None:
    model.set_gradient_reduction("sum" if rank == 0 else "mean")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (forget_on_one_rank, r"count_items\(\) was called for every backward on 1 of 2 ranks"),
        (forget_one_micro_batch, r"on 1 of 2 ranks, and .* only some of the backwards on 1 of 2 ranks"),
        (forget_in_an_accumulation, r"count_items\(\) was called for every backward on 1 of 2 ranks"),
        (choose_on_one_rank, r"set_gradient_reduction\('sum'\) was called on 1 of 2 ranks"),
    ],
)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.ranks(2)
def test_ranks_that_disagree_get_the_same_error(
    group: Any, wrong: Callable[..., None], match: str, in_backward: bool
) -> None:
    """No weight changes, and training goes on after the program is mended."""
    model, rank = ShardLite(net(), group=group), dist.get_rank()
    optimizer = AdamW(model.parameters(), in_backward=in_backward)
    before = model.full_state_dict()
    with pytest.raises(PhaseError, match=match):
        (wrong(model, rank), loss(model, Turn(0, 1, 0)).backward())
    with pytest.raises(PhaseError, match="ended in an exception"):
        optimizer.step()
    model.zero_grad()
    model.set_gradient_reduction("mean")
    same_states("weights after an error", model.full_state_dict(), before)
    if not in_backward:
        run(model, ("local", "step"))
        optimizer.step()
        assert any((value != before[name]).any() for name, value in model.full_state_dict().items())


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_a_step_needs_the_end_of_the_accumulation(group: Any) -> None:
    model = ShardLite(net(), group=group)
    optimizer = AdamW(model.parameters())
    with model.no_sync(sharded=True):
        model.count_items(5)
        loss(model, Turn(0, 1, 0)).backward()
    with pytest.raises(PhaseError, match="run the last backward before a step outside of no_sync"):
        optimizer.step()


# ---- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_counts_travel_with_messages_that_go_anyway(group: Any) -> None:
    """Calls, messages and bytes are those of a backward without counts."""
    for in_backward in (False, True):
        totals = []
        for counts in (False, True):
            model = ShardLite(net(), group=group)
            optimizer = AdamW(model.parameters(), in_backward=in_backward)
            for step in range(3):
                run(model, ("local", "step"), step=step, counts=counts)
                optimizer.step()
                optimizer.zero_grad()
            passes_over(model)
            totals.append(
                {
                    (unit, purpose): (each.calls, each.messages, each.nbytes)
                    for unit, purposes in model.traffic().items()
                    for purpose, each in purposes.items()
                }
            )
        assert totals[0] == totals[1]


# ---- replicas -------------------------------------------------------------------------------------------------------


def kept_in_shards(group: Any, stage: int, counts: bool) -> None:
    """Compare with two models that are each sharded over two ranks, whose sums the test adds."""
    mesh, modes = init_device_mesh("cpu", (2, 2)), ("sharded", "local", "sharded", "step")
    torch.manual_seed(0)
    model, half = ShardLite(net(), stage=stage, group=mesh), ShardLite(net(), stage=stage, group=mesh.get_group(1))
    half.load_full_state_dict(model.full_state_dict())
    half.set_gradient_reduction("sum")
    before = model.traffic()
    for step in range(2):
        total = run(model, modes, step=step, counts=counts)
        run(half, modes, step=step, counts=False)
        expected = {}
        for name, grad in gradients(half).items():
            dist.all_reduce(grad, group=mesh.get_group(0))  # a sum of two commutes
            expected[name] = grad / (total if counts else 4)
        same_states(f"stage {stage}, step {step}", gradients(model), expected)
        norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in expected.values()]))
        if stage == 0:
            torch.testing.assert_close(model.clip_grad_norm_(inf), norm, rtol=1e-6, atol=0)
        for each in (model, half):
            each.zero_grad()
    padded = -(-(256 + 32) // 64) * 64  # a unit has a weight of 256 elements and a bias of 16; here `2*S`
    for unit in model.unit_names:
        sent = {purpose: each.nbytes for purpose, each in model.traffic()[unit].items()}
        earlier = {purpose: each.nbytes for purpose, each in before.get(unit, {}).items()}
        reduced, replicas = (sent[what] - earlier.get(what, 0) for what in ("reduce", "reduce over replicas"))
        gathered = 2 * 4 * padded // 2 if stage == 0 else 0  # the last backward of each step
        assert reduced == 2 * 3 * 4 * padded // 2 + gathered  # three backwards of each step are reduced
        assert replicas == 2 * 2 * 4 * padded // 4  # one all-reduce of a shard in each step


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.ranks(4)
def test_replicas_are_added_once(group: Any, counts: bool) -> None:
    for stage in some_stages(0, 1, 3):
        kept_in_shards(group, stage, counts)


@pytest.mark.ranks(4)
def test_replicas_skip_a_step_after_a_nan_in_an_earlier_backward(group: Any) -> None:
    """A parameter that only one backward of one rank has used has a gradient, and zero_grad() drops what was kept."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    model = ShardLite(Branching(), units=Branches, group=mesh)
    optimizer = AdamW(model.parameters())
    before = model.full_state_dict()
    for bad in (True, False):
        with model.no_sync(sharded=True):
            y = model(torch.ones(5, 6), 1 if rank == 3 else None).square().mean()
            (y * (nan if bad and rank == 2 else 1.0)).backward()
        assert not gradients(model)
        with pytest.raises(PhaseError, match="accumulated but not reduced"):
            optimizer.step()
        model(torch.ones(5, 6), None).square().mean().backward()
        assert any("branch1" in name for name in gradients(model))
        assert not any("branch0" in name for name in gradients(model))
        if bad:
            with pytest.warns(match="was skipped on all ranks"):
                optimizer.step()
            same_states("a skipped step", model.full_state_dict(), before)
        optimizer.zero_grad()
    with model.no_sync(sharded=True):
        (model(torch.ones(5, 6), 0).square().mean() * nan).backward()
    model.zero_grad()
    model(torch.ones(5, 6), None).square().mean().backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


@pytest.mark.ranks(4)
def test_join_divides_what_replicas_kept_by_the_ranks_of_the_end(group: Any) -> None:
    """The number of ranks with a batch falls between two backwards of an accumulation."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    model = ShardLite(nn.Linear(4, 4, bias=False), group=mesh)
    for i, x in enumerate(model.join([torch.ones(1, 4)] * (1 if rank == 3 else 2))):
        with accumulating(model, "step" if i else "sharded"):
            model(x).sum().backward()
    assert all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in gradients(model).values())


# ---- a language model of Transformers -------------------------------------------------------------------------------


def padded(rank: int, micro: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and mask of 4 texts, whose lengths differ by the rank."""
    generator = torch.Generator().manual_seed(10 * rank + micro)
    tokens = torch.randint(0, vocabulary, (4, 24), generator=generator)
    lengths = torch.randint(2, 24, (4,), generator=generator) // (1 + 5 * (rank % 2)) + 1
    mask = (torch.arange(24) < lengths[:, None]).long()
    return tokens, tokens.masked_fill(mask == 0, -100), mask


@pytest.mark.ranks(4)
def test_parameters_that_every_rank_keeps_are_divided_too(group: Any) -> None:
    """Compare `replicate=` with sharding, over two replicas of two ranks."""
    mesh, states = init_device_mesh("cpu", (2, 2)), []
    for replicated in (False, True):
        torch.manual_seed(0)
        module = net()
        model = ShardLite(module, group=mesh, replicate=[module[1]] if replicated else [])
        optimizer = SGD(model.parameters(), lr=0.1)
        run(model, ("sharded", "local", "step"))
        optimizer.step()
        states.append(model.full_state_dict())
    same_states("weights", states[1], states[0])
