"""`AdamW` on a GPU: what it computes there, and that the host never waits for it."""

import warnings

import pytest
import torch
from shardlite_kernels import FORMATS
from torch import nn

from shardlite import NonFiniteWarning
from shardlite.grads.skip_step import Skips
from shardlite.optim.adamw import AdamW
from tests.support.optim_cases import HYPER, NUMELS, assert_same, padded_numel, place_shards

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def no_waiting():
    """A function: after it is called whatever makes the host wait for the device is an error."""

    def forbid():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the mode does not detect all that waits
            torch.cuda.set_sync_debug_mode("error")

    yield forbid
    torch.cuda.set_sync_debug_mode("default")


def make_params():
    torch.manual_seed(0)
    params = place_shards([nn.Parameter(torch.randn(numel, device="cuda")) for numel in NUMELS])
    flat = params[0].data.as_strided((sum(map(padded_numel, NUMELS)),), (1,), 0)
    return flat, params


def kept(optimizer, params):
    """Everything that the optimizer remembers of some parameters."""
    return [value for param in params for value in optimizer.state[param].values()]


def set_grads(flat, params):
    grad = torch.zeros_like(flat)
    for param in params:
        param.grad = grad[param.storage_offset() :][: param.numel()].normal_()


@pytest.mark.parametrize(
    ("state", "lr"), [*((state, 1e-2) for state in FORMATS), ("fp32", torch.tensor(1e-2)), ("fp32", "cuda")]
)
def test_a_step_does_not_wait(no_waiting, state, lr):
    """Nor does a step that leaves everything as it was, or the next one after a count was set from outside."""
    flat, params = make_params()
    lr = torch.tensor(1e-2, device="cuda") if lr == "cuda" else lr
    optimizer = AdamW(params, **HYPER | {"lr": lr}, state=state, max_update=1.0)
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
        if attempt == 1:
            before = [flat.clone(), *(each.clone() for each in kept(optimizer, params))]
            optimizer.found_inf = flags[1]
            optimizer.step()
            assert_same([flat, *kept(optimizer, params)], before)
        if not torch.is_tensor(lr) or lr.is_cpu:
            scheduler.step()
        if attempt == 4:
            optimizer.state[params[0]]["step"].fill_(7)
    torch.cuda.set_sync_debug_mode("default")
    assert [optimizer.state[param]["step"].item() for param in params] == [8, 4, 4, 4, 4, 4]
    assert flat.isfinite().all()


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


def graph_of(step):
    """A CUDA graph of `step()`, which has run before. Capturing runs nothing."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("state", FORMATS)
def test_a_captured_step_is_replayed(state, scaled):
    """With other gradients, another learning rate and another flag each time: the bits of a run without a graph."""
    outcomes = []
    for captured in (False, True):
        flat, params = make_params()
        lr, grads = torch.tensor(1e-2, device="cuda"), torch.zeros_like(flat)
        optimizer = AdamW(params, **HYPER | {"lr": lr}, state=state, max_update=2.0)
        if scaled:
            optimizer.found_inf, optimizer.grad_scale = torch.zeros((), device="cuda"), lr.new_ones(())
        for param in params:
            param.grad = grads[param.storage_offset() :][: param.numel()].view(param.shape)
        graph, side = None, torch.cuda.Stream()
        for attempt in range(8):
            generator = torch.Generator(device="cuda").manual_seed(attempt)
            for param in params:
                param.grad.normal_(generator=generator)
            lr.fill_(1e-2 / (1 + attempt))
            if scaled:
                optimizer.found_inf.fill_(float(attempt in (2, 5)))
                optimizer.grad_scale.fill_(2.0**attempt)
            if not captured or attempt < 3:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # as PyTorch asks for before a capture
                    optimizer.step()
                torch.cuda.current_stream().wait_stream(side)
            else:
                graph = graph_of(optimizer.step) if graph is None else graph
                graph.replay()
        torch.cuda.synchronize()
        outcomes.append([flat, grads, *kept(optimizer, params)])
    assert_same(outcomes[1], outcomes[0])
    assert {optimizer.state[param]["step"].item() for param in params} == {6.0 if scaled else 8.0}


@pytest.mark.parametrize("state", FORMATS)
def test_steps_in_the_backward_have_the_same_bits(state):
    outcomes = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)).cuda()
        params = place_shards(list(model.parameters()))
        optimizer = AdamW(params, **HYPER, state=state, in_backward=in_backward)
        for _ in range(3):
            model(torch.randn(5, 64, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[params[0]]["exp_avg"].dtype == FORMATS[state], "PyTorch's kernel has stepped it"
        outcomes.append([*(param.data for param in params), *kept(optimizer, params)])
    assert_same(outcomes[1], outcomes[0])


def test_the_first_step_that_is_left_out_is_warned_of_without_waiting(no_waiting):
    """The host hears of it later, and names the steps between which it last looked."""
    _, params = make_params()
    optimizer = AdamW(params, **HYPER)
    flags = [torch.tensor(float(step == 3), device="cuda") for step in range(1, 9)]
    skips = Skips(lambda: flags[0], torch.device("cuda"), 5)

    def run():
        while flags:
            skips.before_step(optimizer)
            skips.after_step()
            if len(flags) == 2:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
            del flags[0]

    no_waiting()
    with pytest.warns(NonFiniteWarning, match=r"rank 5: (step 3|one of the steps \d to \d) since") as caught:
        run()
    assert len(caught) == 1
