"""States in host memory: no races, no waits of the host, and the bits of a step of states on the GPU."""

import copy
import gc
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardlite import EMA, AdamW, LayoutError, ShardLite, WholeParameters
from shardlite.checkpoint.contents import Run
from shardlite.checkpoint.in_memory.snapshot import Snapshot
from shardlite.comm import Context
from shardlite.engine import watch
from shardlite.optim import offload
from shardlite.optim.adamw import load_entries
from shardlite.params import ShardTensor
from shardlite.params.host_states import OFFLOADED, HostStates
from shardlite.params.parameters import SteppingShard
from tests.comm.streams import programs
from tests.comm.streams.programs import BF16, EVENTS, NOT_IN_BACKWARD, RUNS, SPLIT, WORLD_SIZE, Training, loss
from tests.comm.streams.simulated_gpu import Gpu
from tests.comm.streams.test_stream_races import assert_no_race, where_the_host_would_wait

CHUNK = 512
"""Bytes of a chunk, so that a unit has several and the buffers are used again."""

OFTEN = {
    "stage 0",
    "stage 2",
    "stage 3",
    "in_backward, stage 3",
    "split24, stage 1",
    "int8",
    "compact",
    "stage 3, ring",
}
EVERY_RUN = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in RUNS]
)


@pytest.fixture(autouse=True)
def short_chunks():
    with mock.patch.object(offload, "CHUNK_NBYTES", CHUNK):
        yield


def local(value):
    """Return this rank's elements of an entry of a state dict."""
    return value.to_local() if isinstance(value, ShardTensor) else value


def results(training):
    """Return copies of weights and states by parameter and name."""
    state = training.optimizer.state_dict()["state"]  # waits for copies
    weights = {("weight", i): each.detach().clone() for i, each in enumerate(training.model.parameters())}
    return weights | {(name, i): local(value).clone() for i, entry in state.items() for name, value in entry.items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@contextmanager
def trained(steps=3, **options):
    """Train on a simulated GPU. Nothing may race, also while the model is dropped."""
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        training = Training(**options)
        training.gpu = gpu
        training.step(steps)
        yield training
        del training
        gc.collect()
    assert_no_race(gpu)


# ---- races ----------------------------------------------------------------------------------------------------------


@EVERY_RUN
def test_a_training_has_no_race_and_the_same_bits(name):
    with trained(**RUNS[name]) as training:
        expected = results(training)
    with trained(**RUNS[name], offload=True) as training:
        assert_same(results(training), expected)
    programs.trains(gpu := Gpu(1), name, offload=0.5)
    assert_no_race(gpu)


@pytest.mark.parametrize(
    ("event", "options"),
    [
        (event, options)
        for event in EVENTS
        for options in ({}, {"stage": 2}, {"precision": SPLIT, "state": "int8"}, {"in_backward": True})
        if not ("in_backward" in options and event in NOT_IN_BACKWARD)
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_what_happens_between_steps_has_no_race(event, options):
    programs.is_interrupted(gpu := Gpu(1), event, offload=True, **options)
    assert_no_race(gpu)


@pytest.mark.parametrize("name", ["stage 3", "compact", "int8"])
def test_a_steady_step_waits_for_nothing(name):
    gpu = Gpu(lag=3)
    with gpu.ranks(WORLD_SIZE):
        training = Training(**RUNS[name], offload=True)
        training.step(3)
        gpu.waits.clear()
        calls = gpu.calls["events created"]
        with where_the_host_would_wait(), mock.patch.object(torch.cuda, "Stream", side_effect=AssertionError):
            training.step()
        assert not +gpu.waits
        assert gpu.calls["events created"] - calls < 40, "each step has the events of the former"


def nothing(*_, **__):
    """Wait for nothing."""


class NoWait:
    """An event that nobody waits for."""

    def record(self, *_):
        pass

    wait = record


class Unready(offload._Buffer):
    ready = property(lambda _: NoWait())


class Unstepped(offload._Buffer):
    stepped = property(lambda _: NoWait())


class Unfreed(offload._Buffer):
    free = property(lambda _: NoWait())


def saves(gpu):
    programs.is_interrupted(gpu, "a save", offload=True, precision=SPLIT)


def trains(gpu):
    programs.trains(gpu, "stage 3", offload=True)


def has_few_chunks(gpu):
    with gpu.ranks(WORLD_SIZE), mock.patch.object(offload, "CHUNK_NBYTES", 1 << 20):
        Training(depth=1, offload=True).step(3)
        gc.collect()


def drops(gpu):
    with gpu.ranks(WORLD_SIZE):
        Training(offload=True).step(2)
        gc.collect()


MUTANTS = {
    "a chunk is stepped before it has arrived": (offload, "_Buffer", Unready, trains),
    "a chunk is copied back before it is stepped": (offload, "_Buffer", Unstepped, trains),
    "a buffer is filled before it was copied back": (offload, "_Buffer", Unfreed, trains),
    "states are copied before they have arrived": (offload.OffloadedSteps, "begin_step", nothing, has_few_chunks),
    "the host reads states before they have arrived": (HostStates, "settle", nothing, saves),
    "weights are gathered before they are stepped": (HostStates, "wait_for_step", nothing, trains),
    "gradients are freed before they were used": (torch.Tensor, "record_stream", nothing, drops),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_found(name, monkeypatch):
    owner, method, mutant, program = MUTANTS[name]
    gpu = Gpu(1)
    if method == "record_stream":
        monkeypatch.setattr(gpu, method, nothing)
    else:
        monkeypatch.setattr(owner, method, mutant)
    program(gpu)
    assert gpu.races


@pytest.mark.parametrize("options", [{}, {"stage": 1}, {"stage": 0, "precision": BF16}], ids=str)
def test_a_step_runs_beside_the_next_forward(options):
    """Each unit waits for its own step only. Reading a shard waits, too."""
    gpu, seen = Gpu(1), []
    with gpu.ranks(WORLD_SIZE):
        training = Training(offload=True, **options)
        training.step(3)
        beside = training.optimizer._layout.offloaded._beside
        for block in training.model.module:
            block.register_forward_pre_hook(lambda *_: seen.append(gpu.current().clock[beside.number]))
        training.step(2)
        after_step = gpu.current().clock[beside.number]
        assert after_step == seen[-1] < beside.clock[beside.number]
        first = seen[-len(training.model.module) :]
        assert first == sorted(first)
        assert len(set(first)) == 5, "each unit waits for one step more"
        shards = training.optimizer.param_groups[0]["params"]
        assert all(type(each) is SteppingShard for each in shards)
        shards[-3].sum()  # of the last block
        assert gpu.current().clock[beside.number] == beside.clock[beside.number]
    assert_no_race(gpu)


READS = {
    "parameters": lambda training: [each + 1 for each in training.model.parameters()],
    "a norm of gradients": lambda training: training.model.clip_grad_norm_(1.0) if training.kept else None,
    "gradients set to zero by hand": lambda training: [
        each.grad.zero_() for each in training.params if each.grad is not None
    ],
    "zero_grad(set_to_none=False)": lambda training: training.optimizer.zero_grad(set_to_none=False),
    "a copy into a shard": lambda training: training.params[3].data.mul_(2.0),
    "full_state_dict": lambda training: training.model.full_state_dict(),
    "state_dict": lambda training: [each.to_local().sum() for each in training.model.state_dict().values()],
    "full_parameters": lambda training: list(training.model.full_parameters()),
    "another step": lambda training: training.optimizer.step(),
    "unwrap": lambda training: training.model.unwrap(),
    "vector": lambda training: nn.utils.parameters_to_vector(training.params),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("options", [{}, {"precision": SPLIT, "state": "int8"}], ids=str)
@pytest.mark.sample(3)
def test_what_reads_weights_or_gradients_waits_for_the_step(read, options):
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        training = Training(offload=True, clip=False, **options)
        training.step(2)
        loss(training.model).backward()
        training.optimizer.step()
        training.params, training.kept = training.optimizer.param_groups[0]["params"], True
        READS[read](training)
        gc.collect()
    assert_no_race(gpu)


def clones_when_later(training):
    """Use what a program took from the model or the optimizer before the latest step."""
    state = list(training.optimizer.state.values()), list(training.optimizer.state_dict()["state"].values())
    taken = [training.model.state_dict(), *state[0], *state[1]]
    loss(training.model).backward()
    training.optimizer.step()
    return [local(each) + 1 for entry in taken for each in entry.values()]


COPIES = {
    "deepcopy of the optimizer": lambda training: [
        each.clone() for entry in copy.deepcopy(training.optimizer).state.values() for each in entry.values()
    ],
    "deepcopy of shards": lambda training: [copy.deepcopy(each) + 1 for each in training.params],
    "states": lambda training: [each + 1 for entry in training.optimizer.state.values() for each in entry.values()],
    "states that are written": lambda training: [
        entry["exp_avg"].mul_(2) for entry in training.optimizer.state.values()
    ],
    "state dicts of an earlier step": clones_when_later,
}


@pytest.mark.parametrize("read", COPIES)
@pytest.mark.parametrize("options", [{}, {"precision": SPLIT, "state": "int8"}], ids=str)
def test_copies_and_states_are_those_after_the_step(read, options):
    """They wait, also if a program reads the states themselves, or a state dict that it made before the step."""
    outcomes = []
    for offloaded in (None, True):
        gpu = Gpu(1)
        with gpu.ranks(WORLD_SIZE):
            training = Training(offload=offloaded, clip=False, **options)
            torch.manual_seed(1)
            training.step(2)
            loss(training.model).backward()
            training.optimizer.step()
            training.params = training.optimizer.param_groups[0]["params"]
            outcomes.append(dict(enumerate(each.detach().clone() for each in COPIES[read](training))))
        assert_no_race(gpu)
    assert_same(*outcomes)


@pytest.mark.parametrize("hooked", [False, True])
def test_reads_wait_also_while_the_first_steps_are_watched(hooked):
    """Shards have other classes then (`engine/watch.py`)."""
    gpu, kinds = Gpu(1), set()
    with gpu.ranks(WORLD_SIZE), mock.patch.object(watch, "EVERY", 6):
        training = Training(offload=True, clip=False)
        if hooked:
            training.optimizer.register_step_post_hook(nothing)
        for _ in range(8):
            loss(training.model).backward()
            training.optimizer.step()
            for shard in training.optimizer.param_groups[0]["params"]:
                kinds.add(type(shard))
                shard.detach().add_(shard.grad)
            training.optimizer.zero_grad()
    assert kinds == {watch.SeenShard, SteppingShard}
    assert_no_race(gpu)


@pytest.mark.parametrize("options", [{}, {"precision": SPLIT}, {"in_backward": True}], ids=str)
def test_averages(options):
    outcomes = []
    for offloaded in (None, True):
        gpu = Gpu(1)
        with gpu.ranks(WORLD_SIZE):
            training = Training(offload=offloaded, **options)
            ema = EMA(training.model, 0.5)
            for _ in range(3):
                training.step()
                ema.update()
            with ema.swapped():
                pass
            outcomes.append({name: each.clone() for name, each in ema.state_dict()["averages"].items()})
            outcomes[-1] |= results(training)
        assert_no_race(gpu)
    assert_same(*outcomes)


# ---- bits -----------------------------------------------------------------------------------------------------------


def with_scaler(training, step):
    scaler = training.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    scaler.scale(loss(training.model) * (float("inf") if step == 1 else 1.0)).backward()
    scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()


def with_nan(training, step):
    (loss(training.model) * (float("nan") if step == 1 else 1.0)).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def with_schedule(training, step):
    training.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
    training.step()


def with_tensor_lr(training, step):
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.01 * (step + 1))
    training.step()


def accumulating(training, step):
    del step
    programs.accumulates(training)


def keeping_gradients(training, step):
    del step
    loss(training.model).backward()
    training.optimizer.step()


def with_two_groups(training, step):
    if step == 0:
        params = list(training.model.parameters())
        training.optimizer = AdamW([{"params": params[::2], "lr": 0.1}, {"params": params[1::2]}], max_norm=0.1)
    loss(training.model).backward()
    training.optimizer.step()
    training.model.zero_grad()


PROGRAMS = [with_scaler, with_nan, with_schedule, with_tensor_lr, accumulating, keeping_gradients, with_two_groups]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", [{}, {"stage": 1, "precision": SPLIT, "state": "int8"}, {"stage": 0}], ids=str)
@pytest.mark.filterwarnings("ignore::shardlite.NonFiniteWarning")
@pytest.mark.sample(3)
def test_the_bits_do_not_depend_on_where_states_are(program, options):
    outcomes = []
    for offloaded in (None, True, 0.4):
        gpu = Gpu(1)
        with gpu.ranks(WORLD_SIZE):
            torch.manual_seed(3)
            training = Training(offload=offloaded, clip=False, **options)
            for step in range(3):
                program(training, step)
            outcomes.append(results(training))
        assert_no_race(gpu)
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[2], outcomes[0])


def test_hybrid_sharding():
    outcomes = []
    for offloaded in (None, True):
        gpu = Gpu(1)
        with gpu.ranks(WORLD_SIZE):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            training = Training(offload=offloaded, group=mesh)
            training.step(3)
            outcomes.append(results(training))
        assert_no_race(gpu)
    assert_same(*outcomes)


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("options", [{}, {"precision": SPLIT, "state": "int8"}], ids=str)
def test_a_state_is_loaded_wherever_states_are(first, options):
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        source, target = Training(offload=first, **options), Training(offload=None if first else True, **options)
        source.step(2)
        target.step(1)
        target.model.load_state_dict(source.model.state_dict())
        state = source.optimizer.state_dict()["state"]  # ranks that send zeros cannot agree on it
        entries = ({name: local(value) for name, value in entry.items()} for entry in state.values())
        load_entries(target.optimizer, zip(target.model.parameters(), entries, strict=True))
        for each in (source, target):
            torch.manual_seed(1)
            each.step(2)
        assert_same(results(target), results(source))


# ---- memory and refusals --------------------------------------------------------------------------------------------


def test_memory_counts_states_by_where_they_are():
    with trained(precision=SPLIT, state="int8", offload=True) as training:
        layout, held = training.optimizer._layout, training.model.memory()
        host = sum(arena.nbytes for arena in layout.arenas)
        assert held[OFFLOADED].now == host == training.gpu.calls["bytes pinned"], "all of it is pinned, once"
        assert held["offload buffers"].now == offload.BUFFERS * CHUNK == layout.offloaded.memory.nbytes
        stays = [*(arena.rows for arena in layout.arenas), *(counts.steps for counts in layout.counts)]
        assert held["optimizer state"].now == held["optimizer state"].peak == sum(each.nbytes for each in stays)
        assert layout.offloaded.copied == 3 * host, "each step copies each state once"


@pytest.mark.parametrize("options", [{}, {"precision": SPLIT, "state": "int8"}], ids=str)
def test_a_copy_in_memory_waits_for_states(options):
    with trained(offload=True, clip=False, **options) as training:
        snapshot = Snapshot(Run(training.model, training.optimizer, None), 0)
        snapshot.copy_into(torch.empty(snapshot.nbytes, dtype=torch.uint8))


def test_first_units_stay_on_the_gpu():
    with trained(offload=0.5) as training:
        assert "states of 3 units in host memory" in repr(training.model)
        stays = [unit.flats[0].states is None for unit in training.model._units]
        assert stays == sorted(stays, reverse=True)
        assert 0 < sum(stays) < len(stays)
        held = training.model.memory()
        assert held["optimizer state"].now > 0 < held[OFFLOADED].now


def test_other_optimizers_are_refused():
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        model = ShardLite(programs.net(), units=programs.Block, offload=True)
        others = [torch.optim.AdamW(model.parameters()), WholeParameters(model.parameters(), torch.optim.SGD, lr=0.1)]
        for optimizer in others:
            loss(model).backward()
            with pytest.raises(LayoutError, match=r"wrapped with offload: use shardlite\.AdamW"):
                optimizer.step()


def test_a_capture_is_refused():
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        training = Training(offload=True)
        with pytest.raises(LayoutError, match="wrap without offload"):
            training.model.capture(training.step)


def test_an_interrupt_leaves_weights_and_states_of_the_same_steps():
    """Ctrl-C in a step: what was stepped has its states, and a later step goes on."""
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        training = Training(offload=True, clip=False)
        training.step(2)
        loss(training.model).backward()
        counts = training.optimizer._layout.counts[0]
        update, calls = counts.update, []

        def interrupted(*args):
            calls.append(update(*args))
            if len(calls) == 5:
                raise KeyboardInterrupt

        with mock.patch.object(counts, "update", interrupted), pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
        assert torch.cuda.current_stream() is gpu.compute
        training.optimizer.zero_grad()
        training.step(2)
        gc.collect()
    assert_no_race(gpu)


def test_an_error_in_a_backward_gives_the_buffer_back_at_once():
    """Also if the program holds the error. Otherwise the buffer would be copied back later, with another chunk."""
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        training = Training(offload=True, in_backward=True)
        training.step(2)
        offloaded, counts = training.optimizer._layout.offloaded, training.optimizer._layout.counts[0]
        copied = offloaded.copied
        steps = mock.patch.multiple(counts, reduce=programs._fail, add_rows=programs._fail)
        back = mock.patch.object(HostStates, "record_copies", autospec=True, side_effect=HostStates.record_copies)
        with steps, back as record, pytest.raises(KeyError) as held:
            loss(training.model).backward()
        assert held.tb
        assert offloaded.copied > copied
        assert record.call_count == 1


def test_bytes_below_the_smallest_unit_are_refused_before_memory_is_allocated():
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE), pytest.raises(ValueError, match="the smallest unit has"):
        Training(offload=1)
    assert not gpu.calls["bytes pinned"]


def refuse(_, what, problem=None, *args, **kwargs):
    del what, args, kwargs
    if problem is not None:
        raise problem


def test_a_driver_that_refuses_at_wrapping_is_an_error_of_all_ranks():
    gpu = Gpu(1)
    refused = mock.patch.object(Gpu, "pin", side_effect=LayoutError("offload: the driver could not pin"))
    with refused, gpu.ranks(WORLD_SIZE), mock.patch.object(Context, "agree", autospec=True) as agree:
        agree.side_effect = refuse
        with pytest.raises(LayoutError, match="could not pin"):
            Training(offload=True, precision=SPLIT)
    assert agree.call_args.args[1] == "offload", "ranks are told before they send weights"


def test_steps_are_in_the_order_of_the_forward_whatever_the_order_of_parameters():
    with trained(offload=True) as training:
        params = list(training.model.parameters())
        expected = training.optimizer._layout.slots
        reverse = AdamW(reversed(params), lr=0.01)
        loss(training.model).backward()
        training.optimizer.zero_grad()
        reverse._current_layout()
        assert [slot.start for slot in reverse._layout.slots] == [slot.start for slot in expected]
