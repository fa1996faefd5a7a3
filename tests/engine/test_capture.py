"""A captured step has the bits of steps that run, and what a graph cannot repeat is refused, on a simulated GPU.

`test_capture_cuda.py` captures steps on a real one.
"""

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from shardlite import EMA, AdamW, LayoutError, PhaseError, Precision, Route, ShardLite
from shardlite.comm import consensus
from shardlite.errors import ShardWarning
from tests.comm.streams.programs import WIDTH, WORLD_SIZE, Block, Checkpointed, Training, net
from tests.comm.streams.simulated_gpu import Gpu
from tests.comm.streams.test_stream_races import assert_no_race, where_the_host_would_wait
from tests.support.internals import context, reducer, units

WARM_UP = 2


class Program:
    """A model, an optimizer, and a step, which is captured or not."""

    def __init__(self, *, captured=True, lr=0.1, make=torch.optim.SGD, block=Block, **options):
        self.model = ShardLite(net(block, depth=2), units=block, **options)
        self.optimizer = make(self.model.parameters(), lr=lr, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
        self.ran = 0
        self.step = self.model.capture(self.train, warmup=WARM_UP) if captured else self.train

    def train(self, x, scale=1.0):  # gradients are too small to be clipped, which a CPU would do by a number
        self.ran += 1
        loss = scale * self.model(x).float().square().mean()
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss}

    def steps(self, numbers, **options):
        return [self.step(batch(number), **options)["loss"].detach().clone() for number in numbers]

    def shards(self):
        return [shard.detach().clone() for shard in self.model.parameters()]


def batch(number, rows=2):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


@contextmanager
def on_gpu(lag=0):
    gpu = Gpu(lag)
    with gpu.ranks(WORLD_SIZE), where_the_host_would_wait():
        yield gpu
    assert_no_race(gpu)


def run(between=lambda program: None, *, captured, **options):
    """Return losses and shards of a run in which something happens after some steps."""
    with on_gpu() as gpu:
        program = Program(captured=captured, **options)
        losses = program.steps(range(5))
        between(program)
        losses += program.steps(range(5, 10))
        return losses, program.shards(), gpu.replays


def assert_same(between=lambda program: None, *, replays, **options):
    """Check that a captured run has the bits of one that is not, and how many of its steps were replayed."""
    losses, shards, _ = run(between, captured=False, **options)
    captured = run(between, captured=True, **options)
    assert all(map(torch.equal, losses, captured[0]))
    assert all(map(torch.equal, shards, captured[1]))
    assert captured[2] == replays


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_a_captured_step_has_the_bits_of_one_that_runs(stage):
    assert_same(replays=10 - WARM_UP, stage=stage)


@pytest.mark.parametrize(
    "options",
    [
        {"route": Route(transport="p2p")},
        {"precision": Precision(compute=torch.bfloat16)},
        {"precision": Precision(quantized_gather=True)},
        {"reshard_after_forward": False},
        {"prefetch": 3},
        {"block": Checkpointed},
    ],
    ids=str,
)
def test_it_has_them_with_any_option(options):
    assert_same(replays=10 - WARM_UP, **options)


class Elsewhere(Program):
    """Gradients are dropped, or set to zero, at the begin of a step or outside of it."""

    def __init__(self, *, drops, begins, **options):
        self.drops, self.begins = drops, begins
        super().__init__(**options)

    def _zero(self):
        self.optimizer.zero_grad(set_to_none=self.drops)

    def train(self, x, scale=1.0):
        if self.begins:
            self._zero()
        loss = self.model(x).float().square().mean()
        with self.model.no_sync():
            (self.model(x + 1).float().square().mean() * 0.5).backward()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def steps(self, numbers, **options):
        losses = []
        for number in numbers:
            losses += super().steps([number], **options)
            if not self.begins:
                self._zero()
        return losses


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_gradients_may_be_dropped_anywhere(drops, begins):
    found = []
    for captured in (False, True):
        with on_gpu():
            program = Elsewhere(captured=captured, drops=drops, begins=begins)
            found.append([*program.steps(range(6)), *program.shards()])
    assert all(map(torch.equal, *found))


def evaluates(program):
    program.model.eval()
    with torch.no_grad():
        program.losses = [program.model(batch(99))]
    program.model.train()


def trains(program):
    program.train(batch(99))


def loads(program):
    program.model.load_full_state_dict(program.model.full_state_dict())


def loads_optimizer(program):
    program.optimizer.load_state_dict(program.optimizer.state_dict())


def freezes(program):
    program.model.module[1].requires_grad_(False)


def halves(program):
    with program.model.gathered(), torch.no_grad():
        for param in program.model.module.parameters():
            param.mul_(0.5)


def looks(program):
    with program.model.gathered(writeback=False):
        pass


def joins(program):
    reducer(program.model).set_participation(counts=True, ranks=3)


def leaves_a_gradient(program):
    program.model(batch(99)).float().square().mean().backward()


def evaluates_a_module(program):
    program.model.module[1].eval()


AGAIN = [trains, loads, loads_optimizer, freezes, halves, looks, joins, leaves_a_gradient, evaluates_a_module]


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("between", AGAIN)
@pytest.mark.sample(2)
def test_what_all_ranks_change_takes_another_warm_up_and_capture(between, stage):
    assert_same(between, replays=10 - 2 * WARM_UP, stage=stage)


def test_another_dtype_of_autocast_takes_another_warm_up_and_capture():
    found = []
    for captured in (False, True):
        with on_gpu() as gpu:
            program = Program(captured=captured)
            losses = program.steps(range(4))
            with torch.autocast("cpu", torch.bfloat16):
                losses += program.steps(range(4, 8))
            found.append([*losses, *program.shards()])
    assert all(map(torch.equal, *found))
    assert gpu.replays == 8 - 2 * WARM_UP


class Accumulating(Program):
    """Each step adds to the gradients of the steps before it."""

    def train(self, x, scale=1.0):
        loss = self.model(x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}


@pytest.mark.parametrize("stage", [3, 0])
def test_gradients_to_which_each_replay_adds_may_be_dropped(stage):
    found = []
    for captured in (False, True):
        with on_gpu() as gpu:
            program = Accumulating(captured=captured, stage=stage)
            losses = program.steps(range(4))
            program.optimizer.zero_grad()
            losses += program.steps(range(4, 8))
            program.optimizer.zero_grad(set_to_none=False)
            losses += program.steps(range(8, 10))
            found.append([*losses, *program.shards()])
    assert all(map(torch.equal, *found))
    assert gpu.replays == 10 - 2 * WARM_UP


@pytest.mark.parametrize("stage", [3, 2, 0])
def test_an_evaluation_sees_the_weights_of_the_latest_replay(stage):
    found = []
    for captured in (False, True):
        outputs = []

        def between(program, outputs=outputs):
            evaluates(program)
            outputs.extend(program.losses)
            outputs.extend(program.steps(range(2)))
            evaluates(program)
            outputs.extend(program.losses)

        *run_of, replays = run(between, captured=captured, stage=stage)
        found.append([*outputs, *run_of[0], *run_of[1]])
    assert all(map(torch.equal, *found))
    assert replays == 12 - WARM_UP, "an evaluation needs no other capture"


@pytest.mark.parametrize("stage", [3, 2])
def test_a_capture_after_an_evaluation_gathers_all_weights(stage):
    """Weights that are there before the capture are not there in a replay."""
    found = []
    for captured in (False, True):
        with on_gpu():
            program = Program(captured=captured, stage=stage, reshard_after_forward=False)
            program.steps(range(WARM_UP))
            evaluates(program)
            found.append([*program.steps(range(4)), *program.shards()])
    assert all(map(torch.equal, *found))


def test_another_shape_or_constant_takes_another_capture_only():
    found = []
    for captured in (False, True):
        with on_gpu() as gpu:
            program = Program(captured=captured)
            losses = program.steps(range(4))
            losses += [program.step(batch(4, rows=3))["loss"].clone(), *program.steps([5], scale=0.5)]
            losses += program.steps([6, 7], scale=0.5)
            found.append([*losses, *program.shards()])
    assert all(map(torch.equal, *found))
    assert program.ran == WARM_UP + 3
    assert gpu.replays == 8 - WARM_UP


def test_a_rank_may_capture_more_often_than_others():
    """The numbers that ranks compare when they diverge are the same after it."""
    standings = []
    for rows in (2, 3):
        with on_gpu():
            program = Program()
            program.steps(range(4))
            program.step(batch(4, rows=rows))
            standings.append((vars(context(program.model).progress._mine), context(program.model).version.number))
    assert standings[0] == standings[1]


# ---- options of optimizers ------------------------------------------------------------------------------------------


class ByTensor(torch.optim.Optimizer):
    """Steps with a learning rate that the host does not read."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad)


def test_a_learning_rate_on_the_gpu_may_change_in_each_step():
    found = []
    for captured in (False, True):
        with on_gpu() as gpu:
            program = Program(captured=captured, make=ByTensor, lr=torch.tensor(0.1))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.5)
            losses = []
            for number in range(6):
                losses += program.steps([number])
                scheduler.step()
            found.append([*losses, *program.shards()])
    assert all(map(torch.equal, *found))
    assert gpu.replays == 6 - WARM_UP


def test_a_learning_rate_that_is_a_number_is_never_an_old_one():
    found = []
    for captured in (False, True):
        with on_gpu() as gpu:
            program = Program(captured=captured)
            losses = program.steps(range(4))
            program.optimizer.param_groups[0]["lr"] = 0.01
            warns = (
                pytest.warns(ShardWarning, match=r"pass it as a tensor: lr=torch\.tensor")
                if captured
                else nullcontext()
            )
            with warns:
                losses += program.steps([4])
            losses += program.steps(range(5, 9))
            found.append([*losses, *program.shards()])
    assert all(map(torch.equal, *found))
    assert gpu.replays == 9 - 2 * WARM_UP


@pytest.mark.parametrize("lr", [0.1, pytest.param(torch.tensor(0.1), id="tensor")])
def test_a_scheduler_inside_the_step_is_refused(lr):
    with on_gpu():
        program = Program(captured=False, make=ByTensor, lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.5)

        def step(x):
            loss = program.train(x)
            scheduler.step()
            return loss

        with pytest.raises(PhaseError, match=r"call scheduler.step\(\) after the captured step"):
            program.model.capture(step)(batch(0))


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(change, *, make=Program, warm_up=WARM_UP, steps=4):
    """Capture a step that `change` has changed. Return the error, after a check that the run can go on as before.

    Then `steps` have the bits of steps that are not captured.
    """
    found = []
    for fails in (False, True):
        with on_gpu() as gpu:
            program = make(captured=fails)
            program.steps(range(warm_up))
            if fails:
                program.step._step = partial(change, program, program.train)
                with pytest.raises(PhaseError) as error:
                    program.step(batch(50))
                program.step._step = program.train
                assert gpu.current() is gpu.compute, "the stream of the capture is not left current"
                assert gpu.launched.total() == gpu.launched_until, "other ranks may take part in no collective"
                assert not any(unit.users for unit in units(program.model))
                assert context(program.model).version.number == warm_up
            found.append([*program.steps(range(steps)), *program.shards(), torch.tensor(program.model.skipped_steps)])
    assert all(map(torch.equal, *found))
    return error.value


def reads_before(program, train, x):
    x.sum().item()
    return train(x)


def reads_in_forward(program, train, x):
    handle = program.model.module[2].register_forward_hook(lambda module, inputs, out: print(float(out.detach().sum())))
    try:
        return train(x)
    finally:
        handle.remove()


def reads_in_backward(program, train, x):
    handle = program.model.module[2].fall.register_full_backward_hook(
        lambda module, grad, _: print(float(grad[0].sum()))
    )
    try:
        return train(x)
    finally:
        handle.remove()


def reads_after(program, train, x):
    return train(x)["loss"].item()


def queries(program, train, x):
    torch.cuda.current_stream().record_event().query()
    return train(x)


def synchronizes(program, train, x):
    torch.cuda.current_stream().record_event().synchronize()
    return train(x)


def uses_another_stream(program, train, x):
    with torch.cuda.stream(torch.cuda.Stream()):
        x = x + 1
    return train(x)


CUDA_REFUSES = [
    reads_before,
    reads_in_forward,
    reads_in_backward,
    reads_after,
    queries,
    synchronizes,
    uses_another_stream,
]


@pytest.mark.parametrize("stage", [3, 2, 0])
@pytest.mark.parametrize("change", CUDA_REFUSES)
@pytest.mark.sample(2)
def test_what_cuda_refuses_is_named_and_the_run_goes_on_as_before(change, stage):
    error = refused(change, make=partial(Program, stage=stage))
    assert "a CUDA graph cannot contain this step: in the step, the host must not wait for the GPU" in str(error)
    assert "operation not permitted when stream is capturing" in str(error.__cause__)


def leaves_out_a_bias(program, train, x):
    layer = program.model.module[2].fall
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    try:
        return train(x)
    finally:
        del layer.forward


def leaves_out_a_unit(program, train, x):
    program.model.module[2].forward = lambda x: x
    try:
        return train(x)
    finally:
        del program.model.module[2].forward


def fails_in_forward(program, train, x):
    raise RuntimeError("CUDA error: capturable=False")


def accumulates(program, train, x):
    outputs = train(x)
    with program.model.no_sync():
        program.model(x).sum().backward()
    return outputs


def replaces_a_buffer(program, train, x):
    program.model.module.register_buffer("seen", x.sum())
    return train(x)


def counts_on_the_host(program, train, x):
    program.model.count_items(2)
    return train(x)


def averages(program, train, x):
    outputs = train(x)
    EMA(program.model).update()
    return outputs


def takes_no_step(program, train, x):
    return program.model(x)


RULES = {
    leaves_out_a_bias: "1 parameters got no gradient on rank 0 while a CUDA graph is captured",
    leaves_out_a_unit: "parameters got no gradient on rank 0",
    fails_in_forward: "build the optimizer with capturable=True",
    accumulates: "accumulate inside the step, with no_sync",
    replaces_a_buffer: "buffer 'seen' was made or replaced in the step",
    counts_on_the_host: r"pass a tensor that the step computes on the GPU",
    averages: r"call update() after the captured step",
    takes_no_step: "no optimizer has stepped the model",
}


@pytest.mark.parametrize("change", RULES)
def test_what_breaks_a_rule_is_named_and_the_run_goes_on_as_before(change):
    assert RULES[change] in str(refused(change))


@pytest.mark.parametrize("change", [reads_in_backward, reads_after])
def test_steps_in_the_backward_are_not_half_taken(change):
    class InBackward(Program):
        def train(self, x):
            self.ran += 1
            loss = self.model(x).float().square().mean()
            loss.backward()
            self.optimizer.step()
            return {"loss": loss}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = partial(InBackward, make=partial(AdamW, in_backward=True))
        # A CPU counts steps on the host, so a replay would take the same step again.
        assert "the host must not wait" in str(refused(change, make=make, steps=WARM_UP))


def test_an_error_of_the_program_stays_as_it_is():
    with on_gpu():
        program = Program()
        program.steps(range(WARM_UP))
        real, program.step._step = program.step._step, lambda x: {}["x"]
        with pytest.raises(KeyError):
            program.step(batch(0))
        program.step._step = real
        program.steps(range(WARM_UP + 2))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([object()], TypeError, "got a object"),
        ([torch.ones(2, WIDTH, device="meta")], ValueError, "on 'meta': pass dense tensors without gradients on 'cpu'"),
        ([torch.ones(2, WIDTH, requires_grad=True)], ValueError, "requires a gradient"),
    ],
)
def test_inputs_that_a_graph_would_not_follow_are_refused(given, error, message):
    with on_gpu(), pytest.raises(error, match=message):
        Program().step(*given)


def test_a_call_inside_a_forward_or_gathered_is_refused():
    with on_gpu():
        program = Program()
        program.steps(range(WARM_UP + 1))
        with program.model.gathered(), pytest.raises(PhaseError, match="call it outside of forwards"):
            program.step(batch(0))
        handle = program.model.module[1].register_forward_hook(lambda *_: program.step(batch(0)))
        with pytest.raises(PhaseError, match="call it outside of forwards"):
            program.model(batch(0))
        handle.remove()
        program.steps([1])


def test_a_count_before_the_step_is_refused():
    with on_gpu():
        program = Program()
        program.model.count_items(torch.tensor(2))
        with pytest.raises(PhaseError, match=r"call count_items\(\) inside the step"):
            program.step(batch(0))


def test_a_step_of_two_models_is_refused():
    with on_gpu():
        program, other = Program(), Training()

        def step(x):
            other.step()
            return program.train(x)

        with pytest.raises(PhaseError, match="AdamW steps another wrapped model, too: capture a step for each model"):
            program.model.capture(step)(batch(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": Precision(diagnose=True)}, "wrap without `diagnose`"),
        ({"route": Route(order="tree", parts=WORLD_SIZE)}, r"wrap without Route\(order='tree'\)"),
    ],
)
def test_options_that_need_the_host_are_refused(options, message):
    with on_gpu(), pytest.raises(LayoutError, match=message):
        Program(**options)


def test_arguments_of_capture_are_checked():
    with on_gpu():
        program = Program()
        with pytest.raises(TypeError, match="step must be a function"):
            program.model.capture(3)
        with pytest.raises(ValueError, match="warmup must be at least 1"):
            program.model.capture(program.train, warmup=0)


def test_an_error_of_another_rank_is_raised_here_and_nothing_was_captured():
    with on_gpu() as gpu:
        program = Program()
        program.steps(range(WARM_UP))

        def report(group, mine, *_, **__):
            return [mine, ("no", *mine[1:])]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(consensus, "all_gather_json", report)
            with pytest.raises(LayoutError, match="rank 1: no"):
                program.step(batch(0))
        assert context(program.model).version.number == WARM_UP
        program.steps(range(WARM_UP + 1))
        assert gpu.replays == 1


# ---- on a CPU -------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_step_is_returned_with_one_warning(group):
    model = ShardLite(nn.Linear(8, 8), group=group)
    optimizer = AdamW(model.parameters())

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    warns = pytest.warns(ShardWarning, match="has no CUDA graphs, so the step runs as it is")
    with warns if group.rank() == 0 else nullcontext():
        captured = model.capture(step)
    assert captured is step
    captured(torch.ones(2, 8))
