"""`AdamW` as it steps tensors of a device: by kernels, which read tables that the host never sees."""

import pytest
import torch
from shardlite_kernels import FORMATS, Hyper, adamw_reference, adamw_scalars_reference
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite.optim import counts
from shardlite.optim.adamw import AdamW
from tests.kernels.adamw_cases import one_row, state_of
from tests.kernels.bits import assert_same_bits
from tests.support.optim_cases import HYPER, make_arena, padded, small_model

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


class Reference:
    """`adamw_reference` on a padded copy of each parameter, with a count that the host keeps.

    `params` are those of the optimizer, in its order; `only` some of them are stepped.
    """

    def __init__(self, params, moments="fp32", only=None):
        self._params = params
        self._only = range(len(params)) if only is None else only
        zeros = [torch.zeros_like(padded(param)) for param in params]
        self.states = [
            state_of(("whole", moments), padded(param), zero, zero) for param, zero in zip(params, zeros, strict=True)
        ]
        self.counts = [0 for _ in params]

    def step(self, found_inf=0.0, grad_scale=1.0, max_update=float("inf"), **changed):
        """`grad_scale` divides a copy; that the gradient itself is written is checked elsewhere."""
        hyper = HYPER | changed
        numbers = Hyper(hyper["lr"], *hyper["betas"], hyper["eps"], hyper["weight_decay"], max_update)
        for index in self._only:
            param = self._params[index]
            if param.grad is not None and param.requires_grad:
                grad = padded(param.grad)
                flags = {"active": float(found_inf == 0), "grad_scale": grad_scale}
                table = one_row(len(grad), self.counts[index] + 1, numbers, number=index, **flags)
                adamw_reference(self.states[index], grad, table, unscale=True)
                self.counts[index] += found_inf == 0

    def assert_same(self, optimizer):
        for index in self._only:
            param, state, mine = self._params[index], self.states[index], optimizer.state[self._params[index]]
            assert mine["step"].item() == self.counts[index]
            pairs = (
                (param.data, state.param),
                *((mine[name], getattr(state, name)) for name in ("exp_avg", "exp_avg_sq")),
            )
            for got, expected in pairs:
                assert_same_bits(got.flatten(), expected[: param.numel()])
            if state.avg_exponent is not None:
                assert_same_bits(mine["exp_avg_exponent"], state.avg_exponent)
                assert_same_bits(mine["exp_avg_sq_exponent"], state.sq_exponent)


@pytest.fixture
def launches(monkeypatch):
    """The number of elements of each kernel launch."""
    numels, kernel = [], counts.adamw

    def counting(state, *args, **kwargs):
        numels.append(state.param.numel())
        kernel(state, *args, **kwargs)

    monkeypatch.setattr(counts, "adamw", counting)
    return numels


def flags(optimizer, found_inf=None, grad_scale=None):
    optimizer.found_inf = None if found_inf is None else torch.tensor(found_inf)
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("moments", FORMATS)
def test_steps_are_those_of_the_reference(launches, moments):
    """Of each parameter alone: random bits depend on nothing but where in its parameter an element lies."""
    arena = make_arena()
    reference, optimizer = Reference(arena.params, moments), AdamW(arena.params, **HYPER, state=moments)
    for seed in range(4):
        arena.new_grads(seed)
        reference.step()
        optimizer.step()
    reference.assert_same(optimizer)
    assert len(launches) == 4


@pytest.mark.usefixtures("fused")
def test_what_is_skipped_does_not_count():
    """One parameter misses a step that counts, one a step that does not: only the first has another count after."""
    arena = make_arena([64, 64, 64])
    reference, optimizer = Reference(arena.params), AdamW(arena.params, **HYPER)
    for seed, (flag, unused) in enumerate([(1.0, None), (0.0, None), (1.0, 0), (0.0, 1), (0.0, None), (0.0, None)]):
        arena.new_grads(seed)
        if unused is not None:
            arena.params[unused].grad = None
        flags(optimizer, flag)
        reference.step(found_inf=flag)
        optimizer.step()
        reference.assert_same(optimizer)
    assert reference.counts == [4, 3, 4]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("moments", FORMATS)
def test_parameters_with_any_histories_are_one_launch(launches, moments):
    """Also across those without a gradient, where what lies in its place is not looked at."""
    arena = make_arena([64, 64, 64, 64])
    reference, optimizer = Reference(arena.params, moments), AdamW(arena.params, **HYPER, state=moments)
    for seed, unused in enumerate([[], [3], [], [1, 2], [0], []]):
        arena.new_grads(seed)
        for index in unused:
            arena.params[index].grad.fill_(float("nan"))
            arena.params[index].grad = None
        reference.step()
        optimizer.step()
    reference.assert_same(optimizer)
    assert reference.counts == [5, 5, 5, 5]
    assert launches == [256, 192, 256, 256, 192, 256]


def test_without_a_gradient_in_the_same_place_launches_are_several(launches):
    arena = make_arena([64, 64, 64, 64])
    optimizer = AdamW(arena.params, **HYPER)
    arena.params[1].grad = arena.params[1].grad.clone()
    optimizer.step()
    assert launches == [64, 64, 128]


@pytest.mark.usefixtures("fused")
def test_a_scale_divides_nothing_of_a_parameter_without_a_gradient(launches):
    arena = make_arena([64, 64, 64])
    optimizer = AdamW(arena.params, **HYPER)
    before = arena.flat_grad.clone()
    arena.params[1].grad = None
    flags(optimizer, 0.0, 4.0)
    optimizer.step()
    assert launches == [192]
    expected = before / 4
    expected[64:128] = before[64:128]
    assert_same_bits(arena.flat_grad, expected)


@pytest.mark.usefixtures("fused")
def test_a_scale_divides_gradients():
    arena = make_arena([100, 33])
    reference, optimizer = Reference(arena.params), AdamW(arena.params, **HYPER)
    for seed, flag in enumerate([0.0, 1.0, 0.0]):
        arena.new_grads(seed)
        before = arena.flat_grad.clone()
        flags(optimizer, flag, 3.0)
        reference.step(found_inf=flag, grad_scale=3.0)
        optimizer.step()
        assert_same_bits(arena.flat_grad, before if flag else before / 3)
    reference.assert_same(optimizer)


@pytest.mark.usefixtures("fused")
def test_a_learning_rate_may_change_anywhere():
    arena = make_arena([64, 33])
    lr = torch.tensor(HYPER["lr"], dtype=torch.float64)
    reference, optimizer = Reference(arena.params), AdamW(arena.params, **HYPER | {"lr": lr})
    for seed in range(5):
        arena.new_grads(seed)
        if seed in (1, 2):
            lr *= 0.3
        if seed == 3:
            optimizer.param_groups[0]["lr"] = 1e-4
        if seed == 4:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        group = optimizer.param_groups[0]
        reference.step(lr=float(group["lr"]), weight_decay=group["weight_decay"])
        optimizer.step()
        reference.assert_same(optimizer)


@pytest.mark.usefixtures("fused")
def test_groups_have_their_own_hyper_parameters(launches):
    arena = make_arena([64, 64, 64])
    first, second, third = arena.params
    ordered = [second, third, first]
    references = [Reference(ordered, only=[0]), Reference(ordered, only=[1]), Reference(ordered, only=[2])]
    groups = [{"params": [second], "lr": 0.5, "eps": 1e-3}, {"params": [third]}, {"params": [first], "max_update": 0.3}]
    optimizer = AdamW(groups, **HYPER)
    for seed in range(3):
        arena.new_grads(seed)
        references[0].step(lr=0.5, eps=1e-3)
        references[1].step()
        references[2].step(max_update=0.3)
        optimizer.step()
    for reference in references:
        reference.assert_same(optimizer)
    assert launches == [192] * 3


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("moments", FORMATS)
def test_a_limit_may_change(moments):
    arena = make_arena([64, 33])
    reference = Reference(arena.params, moments)
    optimizer = AdamW(arena.params, **HYPER, state=moments, max_update=0.5)
    for seed, limit in enumerate([0.5, 0.1, None]):
        arena.new_grads(seed)
        optimizer.param_groups[0]["max_update"] = limit
        reference.step(max_update=float("inf") if limit is None else limit)
        optimizer.step()
        reference.assert_same(optimizer)


def test_a_loaded_state_goes_on():
    arena, twin = make_arena([64, 32, 96]), make_arena([64, 32, 96])
    optimizer, twin_optimizer = AdamW(arena.params, **HYPER), AdamW(twin.params, **HYPER)
    for seed in range(4):
        for each in (arena, twin):
            each.new_grads(seed)
            each.params[seed % 3].grad = None
        optimizer.step()
        if seed == 2:
            twin_optimizer = AdamW(twin.params)
            twin_optimizer.load_state_dict(optimizer.state_dict())
        else:
            twin_optimizer.step()
        if seed == 2:
            twin.flat.copy_(arena.flat)
    assert_same_bits(twin.flat, arena.flat)


@pytest.mark.usefixtures("fused")
def test_a_count_that_was_set_by_hand_counts():
    arena = make_arena([64, 64])
    reference, optimizer = Reference(arena.params), AdamW(arena.params, **HYPER)
    for seed in range(3):
        arena.new_grads(seed)
        if seed == 2:
            optimizer.state[arena.params[1]]["step"].fill_(7)
            reference.counts[1] = 7
        reference.step()
        optimizer.step()
    reference.assert_same(optimizer)


@pytest.mark.usefixtures("fused")
def test_a_frozen_parameter_continues_later():
    arena = make_arena([64, 33])
    reference, optimizer = Reference(arena.params), AdamW(arena.params, **HYPER)
    for seed in range(4):
        arena.new_grads(seed)
        arena.params[0].requires_grad_(seed not in (1, 2))
        reference.step()
        optimizer.step()
    reference.assert_same(optimizer)
    assert reference.counts == [2, 4]


class _NoWaiting(TorchDispatchMode):
    """Fails at whatever would make the host wait for a device, or take memory to it."""

    WAITS = ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "equal", "masked_select", "is_pinned")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("moments", FORMATS)
def test_a_step_asks_the_device_for_nothing(monkeypatch, moments):
    """Not for a learning rate, a flag, a scale or a count; nor does it send anything unless something has changed."""
    arena = make_arena()
    optimizer = AdamW(arena.params, **HYPER | {"lr": torch.tensor(1e-3)}, state=moments)
    arena.params[1].grad = None
    flags(optimizer, 0.0, 2.0)
    optimizer.step()
    arena.new_grads(1)
    optimizer.step()  # the state of the second parameter is made here
    arena.new_grads(2)
    optimizer.step()
    tables = []
    monkeypatch.setattr(counts, "adamw", lambda state, grad, table, unscale, bad: tables.append(table))
    monkeypatch.setattr(counts, "send", lambda *_: pytest.fail("something was sent"))
    monkeypatch.setattr(counts, "hyper_table", lambda *_: pytest.fail("something was sent"))
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for the device"))
    with _NoWaiting():
        for flag in (1.0, 0.0):
            arena.new_grads(3)
            flags(optimizer, flag, 2.0)
            optimizer.step()
        optimizer.state[arena.params[4]]["step"].fill_(11)  # from outside
        arena.new_grads(3)
        optimizer.step()
    monkeypatch.undo()
    assert [table.scalars[:, 9].tolist() for table in tables] == [[0.0] * 6, [1.0] * 6, [1.0] * 6]
    expected = adamw_scalars_reference(
        12, Hyper(1e-3, *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"]), grad_scale=2.0
    )
    assert_same_bits(tables[2].scalars[4], torch.tensor(expected))
    assert [optimizer.state[param]["step"].item() for param in arena.params] == [5, 4, 5, 5, 12, 5]


def test_numbers_are_sent_when_they_have_changed_and_only_then(monkeypatch):
    """Hyper-parameters, and which parameters have gradients."""
    arena, sent = make_arena([64, 64]), []
    optimizer = AdamW(arena.params, **HYPER)
    optimizer.step()
    for name in ("send", "hyper_table"):
        original = getattr(counts, name)
        monkeypatch.setattr(
            counts,
            name,
            lambda *args, name=name, original=original: (sent.append(name), original(*args))[1],
        )
    seen = []
    for change in ("nothing", "lr", "nothing", "fewer gradients", "fewer gradients", "nothing"):
        arena.new_grads(0)
        if change == "lr":
            optimizer.param_groups[0]["lr"] *= 0.5
        if change == "fewer gradients":
            arena.params[0].grad = None
        optimizer.step()
        seen.append(tuple(sent))
        sent.clear()
    assert seen == [(), ("hyper_table",), (), ("send",), (), ("send",)]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("moments", FORMATS)
def test_steps_in_the_backward_have_the_same_bits(moments):
    """Through hooks: one parameter at a time, in whatever order gradients come."""
    outcomes = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = small_model()
        optimizer = AdamW(model.parameters(), **HYPER, state=moments, in_backward=in_backward, max_update=0.7)
        for _ in range(3):
            model(torch.randn(5, 7)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        entries = [optimizer.state[param] for param in model.parameters()]
        outcomes.append([*model.parameters(), *(value for entry in entries for value in entry.values())])
    for got, expected in zip(*outcomes, strict=True):
        assert_same_bits(got, expected)
