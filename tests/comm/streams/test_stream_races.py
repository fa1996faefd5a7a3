"""No two streams of a GPU access the same bytes without an order between them, whatever a program does."""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock
from weakref import WeakSet

import pytest
import torch

from shardlite import PhaseError, Precision, Route
from shardlite.comm import collectives
from shardlite.comm.transport import base
from shardlite.engine.backward import Backward
from shardlite.grads import norm, scale, skip_step
from shardlite.grads.bucket import Bucket
from shardlite.grads.scale import Share
from shardlite.grads.stream_run import StreamRun
from shardlite.optim import in_backward
from tests.comm.streams import programs, simulated_gpu
from tests.comm.streams.programs import EVENTS, NOT_IN_BACKWARD, RUNS, WORLD_SIZE, CalledOnSide, Training, TwoStreams
from tests.comm.streams.simulated_gpu import Gpu
from tests.support.internals import reducer


def assert_no_race(gpu):
    assert not gpu.races, "\n".join(f"{count} x {race}" for race, count in gpu.races.most_common(8))


def assert_free_of_races(program, *arguments, lag=1, **options):
    program(gpu := Gpu(lag), *arguments, **options)
    assert_no_race(gpu)
    return gpu


def by_lag():
    """Yield every run with a GPU that is never behind, and one that is: by turns one of the two is slow.

    Both are slow at stages 1 and 2.
    """
    for place, name in enumerate(RUNS):
        for lag in (0, 3):
            slow = place % 2 == (lag > 0) or (place % 4 in (1, 2) and "stage" in name)
            yield pytest.param(name, lag, id=f"{name}-{lag}", marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "lag"), [*by_lag()])
@pytest.mark.sample(3)
def test_training(name, lag):
    assert_free_of_races(programs.trains, name, lag=lag)


@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 3", "in_backward, stage 3", "bf16 on the wire"])
def test_training_with_reductions_in_slices(name):
    assert_free_of_races(programs.reduces_in_slices, name)


BUCKET = 160 << 10
"""Bytes: ten slices of 16 KiB, or one."""


@pytest.mark.parametrize(
    ("ranks", "room", "moved"),
    [
        (4, BUCKET // 10, {"all-to-all": 3 * BUCKET // 2, "add": BUCKET + BUCKET // 4}),
        (4, BUCKET, {"all-to-all": 2 * BUCKET, "add": BUCKET + BUCKET // 4}),
        (2, BUCKET // 10, {"all-to-all": BUCKET, "add": BUCKET + BUCKET // 2}),
        (4, None, {"reduce-scatter": BUCKET + BUCKET // 4, "add": BUCKET // 2}),
    ],
    ids=["in the bucket", "at once", "in the bucket, two ranks", "fast"],
)
def test_the_memory_traffic_of_a_reduction(ranks, room, moved):
    """As `docs/rings.md` counts it: `3 - 1/W` in the bucket, `3 + 1/W` at once, 2.5 of two ranks, `1 + 3/W` by NCCL."""
    gpu = Gpu()
    gpu.slice_nbytes = room or gpu.slice_nbytes

    def add(out, *sources):
        gpu.current().launch()
        gpu.access(out, "add", writes=True)
        read = [each for each in sources if isinstance(each, torch.Tensor)]
        if len(read) == 2 and read[0].dim() == 2:  # the bucket, of which a part is in staging instead
            read[0] = read[0].view(-1)[len(read[1]) :]
        for each in read:
            gpu.access(each, "add", writes=False)

    with gpu.ranks(ranks), mock.patch.multiple(base, add_rows=add, hop=add):
        transport, numel = simulated_gpu._Collectives(gpu, None), BUCKET // 4
        transport.fast = room is None
        full, out = torch.empty(numel), torch.empty(numel // ranks)
        staging = torch.empty(collectives.staging_numel(numel, transport, full.dtype))
        collectives.reduce_scatter(full, transport, last=collectives.StoreMean(out), staging=staging)
    assert gpu.moved == moved
    assert_no_race(gpu)


PLAIN = [{"stage": 2}, {"stage": 3}]
OTHERS = [{"stage": 3}, {"in_backward": True}]


@pytest.mark.parametrize(
    ("event", "options"),
    [
        pytest.param(event, each, id=f"{event}-{each}", marks=pytest.mark.slow if each == PLAIN[0] else ())
        for event in EVENTS
        for each in (*PLAIN, *[{"in_backward": True}] * (event not in NOT_IN_BACKWARD))
    ],
)
@pytest.mark.sample(2)
def test_between_steps(event, options):
    assert_free_of_races(programs.is_interrupted, event, **options)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("transport", ["collectives", "p2p"])
def test_a_model_that_is_dropped_with_operations_in_flight(where, transport):
    assert_free_of_races(programs.is_dropped, where, transport)


def test_models_that_have_the_communicators_of_former_ones():
    gpu = assert_free_of_races(programs.is_replaced)
    assert len(gpu.communicators) == 3  # gathers, reductions, and what stands for the program's


@pytest.mark.parametrize(
    "options", [pytest.param({"stage": 2}, marks=pytest.mark.slow), *OTHERS, {"route": Route(transport="p2p")}], ids=str
)
@pytest.mark.parametrize("trains_both", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("block", [TwoStreams, CalledOnSide])
def test_a_model_on_two_streams(block, trains_both, options):
    assert_free_of_races(programs.has_two_streams, block, trains_both=trains_both, **options)


@pytest.mark.parametrize(
    ("event", "options"),
    [
        *((event, {}) for event in ("an evaluation", "no_sync", "gathered()", programs.KEPT)),
        ("an evaluation", {"reshard_after_forward": False}),
    ],
    ids=str,
)
def test_a_run_that_moves_to_another_stream(event, options):
    """It has weights that are gathered or stay, gradients that are kept, or gives up a buffer there."""
    assert_free_of_races(programs.moves, event, **options)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_evaluations_on_two_streams_by_turns(prefetch):
    assert_free_of_races(programs.alternates, prefetch=prefetch)


@pytest.mark.parametrize("options", [{"stage": 2}, {}, {"dims": (1,)}, {"dims": (2,)}, {"in_backward": True}], ids=str)
def test_gradients_of_another_stream(options):
    """Of all parameters, of biases only, or of matrices only: the stream of one says nothing about another's."""
    assert_free_of_races(programs.accumulates_elsewhere, **options)


@pytest.mark.parametrize("options", [*OTHERS, {"precision": Precision(quantized_gather=True)}], ids=str)
def test_a_unit_that_comes_later(options):
    assert_free_of_races(programs.grows, **options)


def test_two_models():
    assert_free_of_races(programs.has_two_models)


LAUNCHES = {
    "stage 0": {"collectives": 12},
    "stage 2": {"collectives": 12},
    "stage 3": {"collectives": 14},
    "in_backward, stage 3": {"collectives": 18},
    "stage 3, ring": {"batches": 45, "messages": 90},
}


@contextmanager
def counted_memory():
    """Note the buckets, and the units whose gradients are kept beside them, each time that a unit is reduced."""
    live, buckets, lent = WeakSet(), [], []
    take, free = Bucket.allocate, StreamRun.free_copied

    def taking(bucket, carrier=None):
        take(bucket, carrier)
        live.update(full.untyped_storage() for full in bucket.full)
        buckets.append(len(live))

    def freeing(run):
        free(run)
        lent.append(len(run.copying))

    with mock.patch.object(Bucket, "allocate", taking), mock.patch.object(StreamRun, "free_copied", freeing):
        yield buckets, lent


@contextmanager
def where_the_host_would_wait():
    """Take the ways of a GPU, on which a host that reads a number waits. `Gpu.waits` counts that."""
    with ExitStack() as stack:
        for module in (skip_step, scale):
            stack.enter_context(mock.patch.object(module, "is_here", return_value=False))
        stack.enter_context(mock.patch.object(in_backward, "is_here", return_value=False))
        stack.enter_context(mock.patch.object(norm, "use_triton", return_value=True))
        yield


PROMPT = {*LAUNCHES, "stage 1", "bf16", "checkpointed", "checkpointed, reentrant", "compact"}
"""The runs that are looked at each time, for waits in a steady step. The others are slow."""

EVERY_RUN = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PROMPT else pytest.mark.slow) for name in RUNS]
)


@EVERY_RUN
def test_a_steady_step_waits_for_nothing(name):
    """On a GPU that is behind: a query would be in vain three times."""
    gpu = Gpu(lag=3)
    with gpu.ranks(WORLD_SIZE):
        training = Training(**RUNS[name])
        training.step(3)
        gpu.launched.clear()
        gpu.waits.clear()
        with counted_memory() as (buckets, lent), where_the_host_would_wait():
            training.step()
        assert not +gpu.waits
        assert dict(gpu.launched) == LAUNCHES.get(name, dict(gpu.launched))
        # A message from and to the neighbours in a ring, from and to each other rank in a direct exchange.
        assert gpu.largest_batch == (2 if "ring" in name else 2 * (WORLD_SIZE - 1) if name == "direct" else 0)
        assert not any(lent)
        if "stage 0" not in name and "stage 1" not in name:
            assert max(buckets) == 1


@EVERY_RUN
@pytest.mark.sample(2)
def test_a_step_can_be_captured(name):
    gpu = Gpu(lag=3)
    with gpu.ranks(WORLD_SIZE):
        training = Training(**RUNS[name])
        training.step(4)
        with where_the_host_would_wait():
            with gpu.capturing():
                training.step()
            training.step()
    assert_no_race(gpu)


def steady(*, captured, **options):
    """Return a GPU after a steady step, and for each collective how much of each stream in the step it is behind."""
    gpu = Gpu(lag=3)
    with gpu.ranks(WORLD_SIZE):
        training = Training(**options)
        training.step(4)
        with where_the_host_would_wait(), gpu.capturing() if captured else nullcontext():
            streams = {"program": gpu.current(), **{each.name: each for each in gpu._streams}}
            begins = {stream: stream.clock[stream.number] for stream in streams.values()}
            gpu.collectives.clear()
            training.step()
    assert_no_race(gpu)
    names = [name for name in ("program", "gather", "reduce", "nccl") if name in streams]
    return gpu, [
        {name: clock[streams[name].number] - begins[streams[name]] for name in names} for *_, clock in gpu.collectives
    ]


@EVERY_RUN
@pytest.mark.sample(2)
def test_a_captured_step_orders_nothing_that_a_launched_one_does_not(name):
    """Except for the hosts' negotiation, which a graph does not have."""
    assert steady(captured=True, **RUNS[name])[1] == steady(captured=False, **RUNS[name])[1]


def test_late_reductions_in_a_capture_are_not_behind_the_whole_backward():
    """Reductions are late if the backward does not know that a unit's gradients are complete."""
    with mock.patch.object(Backward, "_is_complete", return_value=False):
        assert steady(captured=True)[1] == steady(captured=False)[1]


def test_a_gather_in_a_graph_depends_on_one_operation_of_the_program_and_on_the_last_gather():
    gpu, _ = steady(captured=True)
    (stream,) = {stream for stream, *_ in gpu.collectives if stream.name == "gather"}
    others = [
        [node for node in edges if node[0] != stream.number]
        for (number, _), edges in gpu.edges.items()
        if number == stream.number
    ]
    gathers = sum(each is stream for each, *_ in gpu.collectives)
    assert [len(each) for each in others if each] == [1] * gathers
    assert {number for each in others for number, _ in each} == {gpu._origin.number}


def test_a_steady_step_that_accumulates_waits_for_nothing():
    gpu = Gpu(lag=3)
    with gpu.ranks(WORLD_SIZE):
        training = Training()
        for step in range(4):
            if step == 3:
                gpu.waits.clear()
            with where_the_host_would_wait():
                EVENTS["no_sync"](training)
    assert not +gpu.waits
    assert_no_race(gpu)


@pytest.mark.parametrize("name", ["stage 3", "in_backward, stage 3"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_steady_step_with_counts_waits_for_nothing(name, sharded):
    """Counts are numbers of the host, and of the device. Ranks agree, although what they send arrives as zeros."""
    gpu = Gpu(lag=3)
    agreed = mock.patch.object(Share, "disagree", lambda share, sums, *_: (sums < 0).any())
    with gpu.ranks(WORLD_SIZE), agreed, mock.patch.object(scale, "is_here", return_value=False):
        training = Training(**RUNS[name])
        for step in range(4):
            if step == 3:
                gpu.waits.clear()
            with where_the_host_would_wait():
                with training.model.no_sync(sharded=sharded):
                    training.model.count_items(2)
                    programs.loss(training.model).backward()
                training.model.count_items(torch.tensor(3))
                training.step()
    assert not +gpu.waits
    assert_no_race(gpu)


def test_steps_without_counts_may_follow_counted_ones_on_a_gpu():
    """Ranks agree, although what they send arrives as zeros."""
    agreed = mock.patch.object(Share, "disagree", lambda share, sums, *_: (sums < 0).any())
    gpu = Gpu()
    with gpu.ranks(WORLD_SIZE), agreed, mock.patch.object(scale, "is_here", return_value=False):
        training = Training()
        training.model.count_items(2)
        for _ in range(3 + scale.LATER):
            training.step()
        assert training.model.skipped_steps == 0
    assert_no_race(gpu)


def test_counts_that_differ_are_found_on_a_gpu():
    """Other ranks send zeros, as if they did not count. No step is taken until the error, which is late."""
    gpu, flags = Gpu(), []
    with gpu.ranks(WORLD_SIZE), mock.patch.object(scale, "is_here", return_value=False):
        training = Training(clip=False)
        for _ in range(scale.LATER):
            training.model.count_items(2)
            programs.loss(training.model).backward()
            flags.append(reducer(training.model).results.nonfinite())
            training.model.zero_grad()
        training.model.count_items(2)
        with pytest.raises(PhaseError, match=r"rank 0 of .* steps are skipped"):
            programs.loss(training.model).backward()
    assert torch.stack(flags).eq(1).all(), "an optimizer takes none of these steps"


@pytest.mark.parametrize("parts", [WORLD_SIZE, 2 * WORLD_SIZE])
@pytest.mark.parametrize("left_out", [None, 1, 2, 4])
@pytest.mark.sample(2)
def test_sums_over_parts(parts, left_out):
    gpu = Gpu(1)
    with gpu.ranks(WORLD_SIZE):
        training = Training(route=Route(order="tree", parts=parts))
        for step in range(4):
            block = training.model.module[left_out or 1]
            if left_out is not None and step == 2:
                block.forward = lambda x: x
            for _ in training.model.parts():
                programs.loss(training.model).backward()
            training.finish()
            vars(block).pop("forward", None)
    assert_no_race(gpu)


def test_a_capture_in_which_a_parameter_gets_no_gradient_is_refused():
    gpu = Gpu()
    with gpu.ranks(WORLD_SIZE):
        training = Training()
        training.step(3)
        with gpu.capturing(), pytest.raises(PhaseError, match="1 parameters got no gradient on rank 0"):
            EVENTS["a bias that is left out"](training)


def test_a_capture_that_needs_another_order_is_refused():
    gpu = Gpu()
    with gpu.ranks(WORLD_SIZE):
        training = Training()
        with gpu.capturing(), pytest.raises(PhaseError, match="run three steps like the captured one"):
            training.step()


def test_the_program_waits_for_other_hosts_in_the_first_pass_of_a_kind_only():
    """A round for each gather, five in a forward and two in a backward; at the end of both one, and all lists."""
    gpu, waits = Gpu(), []
    with gpu.ranks(WORLD_SIZE):
        training = Training()
        for turn in (training.step, training.step, *[partial(EVENTS["an evaluation"], training)] * 2, training.step):
            gpu.waits.clear()
            turn()
            waits.append(gpu.waits["other hosts"])
    assert waits == [5 + 2 + 2 + 2, 0, 5 + 2, 0, 0]
