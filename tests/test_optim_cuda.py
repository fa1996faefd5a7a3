"""`AdamW` on a GPU: what it computes there, and that the host never waits for it."""

import pytest
import torch
from torch import nn

from shardlite.optim import AdamW
from tests.optim_cases import HYPER, NUMELS, assert_same, padded_numel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def no_waiting():
    """A function: after it is called whatever makes the host wait for the device is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def make_params():
    torch.manual_seed(0)
    flat, offset, params = torch.zeros(sum(map(padded_numel, NUMELS)), device="cuda"), 0, []
    for numel in NUMELS:
        flat[offset : offset + numel].normal_()
        params.append(nn.Parameter(flat.data[offset : offset + numel]))
        offset += padded_numel(numel)
    return flat, params


def set_grads(flat, params):
    grad = torch.zeros_like(flat)
    for param in params:
        param.grad = grad[param.storage_offset() :][: param.numel()].normal_()


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2), "cuda"])
def test_a_step_does_not_wait(no_waiting, lr):
    flat, params = make_params()
    optimizer = AdamW(params, **HYPER | {"lr": torch.tensor(1e-2, device="cuda") if lr == "cuda" else lr})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    flags = [torch.tensor(float(flag), device="cuda") for flag in (0, 1, 0)]
    scale = torch.tensor(2.0, device="cuda")
    for attempt in range(6):
        set_grads(flat, params)
        if attempt == 2:
            no_waiting()  # plans, states and kernels are there
        if attempt == 4:
            params[1].grad = None
        optimizer.found_inf, optimizer.grad_scale = flags[attempt % 3], scale if attempt > 3 else None
        optimizer.step()
        if lr != "cuda":
            scheduler.step()
    torch.cuda.set_sync_debug_mode("default")
    assert [optimizer.state[param]["step"].item() for param in params] == [4, 4, 4, 4, 4, 4]


def test_the_first_step_has_the_bits_of_torch_fused():
    """`beta^1` needs no power."""
    flat, params = make_params()
    twin = nn.Parameter(flat.clone())
    set_grads(flat, params)
    twin.grad = torch.zeros_like(flat)
    for param in params:
        twin.grad[param.storage_offset() :][: param.numel()] = param.grad
    AdamW(params, **HYPER).step()
    torch.optim.AdamW([twin], **HYPER, fused=True).step()
    assert_same(flat, twin.data)


def test_with_the_flag_nothing_changes():
    flat, params = make_params()
    optimizer = AdamW(params, **HYPER)
    set_grads(flat, params)
    optimizer.step()
    everything = [flat, *(value for state in optimizer.state.values() for value in state.values())]
    before = [tensor.clone() for tensor in everything]
    set_grads(flat, params)
    optimizer.found_inf, optimizer.grad_scale = torch.ones((), device="cuda"), torch.tensor(2.0, device="cuda")
    optimizer.step()
    assert_same(everything, before)
