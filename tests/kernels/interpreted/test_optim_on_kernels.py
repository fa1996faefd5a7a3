"""`AdamW` as it steps tensors of a device: by kernels, which read tables that the host never sees."""

import pytest
import torch
from shardlite_kernels import FORMATS, Hyper
from shardlite_kernels.scalars import adamw_scalars_reference
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite.optim import counts
from shardlite.optim.adamw import AdamW
from tests.kernels.bits import assert_all_same_bits, assert_same_bits
from tests.support.optim_cases import HYPER, SCENARIOS, by_reference, flags, make_arena, small_model


@pytest.fixture
def launches(monkeypatch):
    """The number of elements of each kernel launch."""
    numels, kernel = [], counts.adamw

    def counting(state, *args, **kwargs):
        numels.append(state.param.numel())
        kernel(state, *args, **kwargs)

    monkeypatch.setattr(counts, "adamw", counting)
    return numels


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.sample(2)
def test_steps_are_those_of_the_reference(launches, moments, name):
    """Of each parameter alone, in one launch, also across parameters without a gradient."""
    SCENARIOS[name].run(moments, by_reference)
    assert launches == {"unused": [256, 192, 256, 256, 192, 256]}.get(name, launches)


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
            counts, name, lambda *args, name=name, original=original: (sent.append(name), original(*args))[1]
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
    assert_all_same_bits(*outcomes)
