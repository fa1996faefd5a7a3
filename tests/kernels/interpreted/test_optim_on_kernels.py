"""`AdamW` as it steps tensors of a device: by kernels, which read tables that the host never sees."""

import pytest
import torch
from shardlite_kernels import Hyper, adamw_reference, adamw_scalars_reference
from torch.utils._python_dispatch import TorchDispatchMode

import shardlite.counts
from shardlite.optim import AdamW
from tests.kernels.bits import assert_same_bits
from tests.optim_cases import HYPER, make_arena, padded

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


class Reference:
    """`adamw_reference` on a padded copy of each parameter, with a count that the host keeps."""

    def __init__(self, params):
        self._params = params
        self.states = [
            [padded(param), torch.zeros_like(padded(param)), torch.zeros_like(padded(param))] for param in params
        ]
        self.counts = [0 for _ in params]

    def step(self, found_inf=0.0, grad_scale=1.0, **changed):
        """`grad_scale` divides a copy; that the gradient itself is written is checked elsewhere."""
        hyper = HYPER | changed
        for index, param in enumerate(self._params):
            if param.grad is not None and param.requires_grad:
                numbers = Hyper(hyper["lr"], *hyper["betas"], hyper["eps"], hyper["weight_decay"])
                flags = {"found_inf": found_inf, "grad_scale": grad_scale}
                row = torch.tensor(adamw_scalars_reference(self.counts[index] + 1, numbers, **flags))
                flat, exp_avg, exp_avg_sq = self.states[index]
                adamw_reference(flat, padded(param.grad), exp_avg, exp_avg_sq, row, unscale=True)
                self.counts[index] += found_inf == 0

    def assert_same(self, optimizer):
        for param, count, state in zip(self._params, self.counts, self.states, strict=True):
            mine = optimizer.state[param]
            assert mine["step"].item() == count
            for got, expected in zip((param.data, mine["exp_avg"], mine["exp_avg_sq"]), state, strict=True):
                assert_same_bits(got.flatten(), expected[: param.numel()])


@pytest.fixture
def launches(monkeypatch):
    """The number of elements of each kernel launch."""
    numels, kernel = [], shardlite.counts.adamw

    def counting(param, *args, **kwargs):
        numels.append(param.numel())
        kernel(param, *args, **kwargs)

    monkeypatch.setattr(shardlite.counts, "adamw", counting)
    return numels


def flags(optimizer, found_inf=None, grad_scale=None):
    optimizer.found_inf = None if found_inf is None else torch.tensor(found_inf)
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale)


@pytest.mark.usefixtures("fused")
def test_steps_are_those_of_the_reference(launches):
    arena = make_arena()
    reference, optimizer = Reference(arena.params), AdamW(arena.params, **HYPER)
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


def test_parameters_with_one_history_are_one_launch(launches):
    arena = make_arena([64, 64, 64, 64])
    optimizer = AdamW(arena.params, **HYPER)
    for unused in (None, 3, None, None):
        arena.new_grads(0)
        if unused is not None:
            arena.params[unused].grad = None
        flags(optimizer, 1.0 if unused is None else 0.0)
        optimizer.step()
    assert launches == [256, 192, 192, 64, 192, 64]


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
    references = [Reference([first, third]), Reference([second])]
    optimizer = AdamW([{"params": [second], "lr": 0.5, "eps": 1e-3}, {"params": [third, first]}], **HYPER)
    for seed in range(2):
        arena.new_grads(seed)
        references[0].step()
        references[1].step(lr=0.5, eps=1e-3)
        optimizer.step()
    for reference in references:
        reference.assert_same(optimizer)
    assert launches == [64, 64, 64] * 2


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


def test_a_step_asks_the_device_for_nothing(monkeypatch):
    """Not for a learning rate, a flag, a scale or a count; nor does it send anything unless something has changed."""
    arena = make_arena()
    optimizer = AdamW(arena.params, **HYPER | {"lr": torch.tensor(1e-3)})
    arena.params[1].grad = None
    flags(optimizer, 0.0, 2.0)
    optimizer.step()
    arena.new_grads(1)
    optimizer.step()  # the state of the second parameter is made here
    arena.new_grads(2)
    optimizer.step()
    rows = []
    monkeypatch.setattr(shardlite.counts, "adamw", lambda *args, unscale: rows.append(args[4]))
    monkeypatch.setattr(shardlite.counts, "send", lambda *_: pytest.fail("something was sent"))
    monkeypatch.setattr(shardlite.counts, "hyper_table", lambda *_: pytest.fail("something was sent"))
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for the device"))
    with _NoWaiting():
        for flag in (1.0, 0.0):
            arena.new_grads(3)
            flags(optimizer, flag, 2.0)
            optimizer.step()
    monkeypatch.undo()
    assert [row[7].item() for row in rows] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert [optimizer.state[param]["step"].item() for param in arena.params] == [4, 3, 4, 4, 4, 4]
