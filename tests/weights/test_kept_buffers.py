"""On a GPU gather buffers are kept, so weights keep their addresses. Buckets are memory of a stream.

The GPU is simulated (`tests/comm/streams/`), which shows addresses, allocations and operators. That the bits are right
is shown over gloo, by pools configured as on a GPU.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardlite import AdamW, EscapedViewWarning, Route, ShardLite
from shardlite.comm import Transport
from shardlite.comm.streams import ThreadQueue
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.grads.bucket import Bucket
from shardlite.params import ROOT, Buffer, Unit
from shardlite.weights.gather_order import MEMORY
from shardlite.weights.policy import BufferPolicy, BufferPool
from tests.comm.streams.programs import EVENTS, NOT_IN_BACKWARD, RUNS, WIDTH, WORLD_SIZE, Block, Training
from tests.comm.streams.simulated_gpu import Gpu
from tests.support.internals import context, flats, gatherer, reducer, units
from tests.support.models.small import VOCABULARY, LanguageModel
from tests.support.twins.sharded import Pair, Turn, slow, take_step

Place = tuple[str, int]
"""A unit, and the address of its buffer."""


@contextmanager
def places() -> Iterator[list[Place]]:
    """Note where the weights of a unit lie whenever its parameters become full."""
    noted: list[Place] = []
    bind = Unit.bind

    def noting(unit: Unit) -> None:
        bind(unit)
        assert unit.buffer is not None
        noted.append((unit.name, unit.buffer.bytes.data_ptr()))

    with mock.patch.object(Unit, "bind", noting):
        yield noted


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Note the bytes of memory for buffers and buckets. To be entered before a model is wrapped."""
    noted: list[int] = []
    allocate, take = BufferPool._allocate, Bucket.allocate

    def allocating(pool: BufferPool, nbytes: int) -> Buffer:
        noted.append(nbytes)
        return allocate(pool, nbytes)

    def taking(bucket: Bucket, carrier: Transport | None = None) -> None:
        take(bucket, carrier)
        noted.extend(full.nbytes for full in bucket.full)

    with mock.patch.object(BufferPool, "_allocate", allocating), mock.patch.object(Bucket, "allocate", taking):
        yield noted


def spare(model: ShardLite) -> list[Tensor]:
    return list(gatherer(model).spare())


def held(model: ShardLite, purpose: str) -> int:
    return model.memory()[purpose].now


def bucket_sizes(training: Training) -> list[int]:
    """Return the bytes of the bucket of each unit, which has one flat."""
    return sorted(flat.gradients.full_numel * flat.reduce.itemsize for flat in flats(training.model))


def block_of(training: Training, index: int = 2) -> nn.Module:
    return training.model.module[index]


STEADY = [name for name, options in RUNS.items() if options.get("stage", 3) == 3 and name != "kept until backward"]


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.sample(2)
def test_weights_lie_in_each_step_where_they_lay_in_the_second(name):
    with Gpu().ranks(WORLD_SIZE), places() as now:
        training, steps = Training(**RUNS[name]), []
        for _ in range(5):
            training.step()
            steps.append(list(now))
            now.clear()
    assert steps[1] == steps[2] == steps[3] == steps[4]
    by_unit = dict(steps[1])
    assert set(steps[1]) == set(by_unit.items())  # in the forward and in the backward
    blocks = {place for unit, place in by_unit.items() if unit != ROOT}
    assert len(blocks) <= 1 + RUNS[name].get("prefetch", 1)


class Sized(Block):
    """A block of one of several sizes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)


def mixed(*sizes: int, **options: Any) -> Training:
    blocks = map(Sized, sizes)
    return Training(partial(next, blocks), units=Sized, **options)


SIZES = [(16, 64, 32, 48), (64, 16, 16, 16), (16, 16, 16, 64), (16, 64, 16, 64), (64, 48, 32, 16), (16, 32, 48, 64)]


@pytest.mark.parametrize("prefetch", [slow(0), 1, slow(2)])
@pytest.mark.parametrize("sizes", [*SIZES[:2], *map(slow, SIZES[2:])], ids=str)
def test_blocks_of_several_sizes_find_their_places(sizes, prefetch):
    with Gpu().ranks(WORLD_SIZE), places() as now, allocations() as allocated:
        training = mixed(*sizes, prefetch=prefetch)
        steps = []
        for _ in range(2 * MEMORY):
            now.clear()
            allocated.clear()
            training.step()
            steps.append(list(now))
        assert all(step == steps[2] for step in steps[3:])  # in the second one, units are gathered ahead first
        assert sorted(allocated) == bucket_sizes(training)
        largest = max(unit.nbytes for unit in units(training.model) if not unit.is_root)
        root = next(unit.nbytes for unit in units(training.model) if unit.is_root)
        assert held(training.model, "gather buffers") <= (1 + prefetch) * largest + root


ALLOCATED = [
    *(f"stage {stage}" for stage in range(4)),
    *(f"in_backward, stage {stage}" for stage in range(4)),
    *("stage 3, ring", "bf16", "far prefetch", "no prefetch", "checkpointed", "compact", "direct", "fast"),
]


@pytest.mark.parametrize("name", ALLOCATED)
@pytest.mark.sample(2)
def test_a_steady_step_allocates_buckets_alone(name):
    with Gpu().ranks(WORLD_SIZE), allocations() as allocated:
        training = Training(**RUNS[name])
        for _ in range(4):
            allocated.clear()
            training.step()
        assert sorted(allocated) == bucket_sizes(training)


@contextmanager
def dirty_buckets() -> Iterator[Counter[str]]:
    """Allocate buckets full of ones, and check before each reduction that what no gradient fills is zero.

    Counts by unit the elements that are.
    """
    noted: Counter[str] = Counter()
    take, copy_in = Bucket.allocate, Bucket.copy_in

    def taking(bucket: Bucket, carrier: Transport | None = None) -> None:
        take(bucket, carrier)
        for full in bucket.full:
            full.fill_(1)

    def copying(bucket: Bucket) -> tuple[Callable[[], None], list[Tensor]]:
        run, gradients = copy_in(bucket)
        places = [
            flat.gradients.gaps({i for i, used in enumerate(bucket.flags(flat)) if used}) for flat in bucket.flats
        ]
        gaps = [full[slice(*each)] for some, full in zip(places, bucket.full, strict=True) for each in some]

        def checked() -> None:
            run()
            assert not any(gap.any() for gap in gaps)
            noted[bucket.unit.name] += sum(gap.numel() for gap in gaps)

        return checked, gradients

    with mock.patch.object(Bucket, "allocate", taking), mock.patch.object(Bucket, "copy_in", copying):
        yield noted


def test_what_no_gradient_fills_is_zero():
    with Gpu().ranks(WORLD_SIZE), dirty_buckets() as zeros:
        training = mixed(16, 48, 16, 48, 16)
        assert all(flat.gradients.padding for flat in flats(training.model))
        training.step()
        every = set(zeros)
        assert every == {unit.name for unit in units(training.model)}
        block_of(training).rise.weight.requires_grad_(False)
        training.step()
        block_of(training).rise.weight.requires_grad_(True)
        zeros.clear()
        training.step()
        padding = Counter(zeros)
        zeros.clear()
        block_of(training).fall.forward = lambda x: x[:, :WIDTH]  # unused: zeros where its gradients were
        training.step()
        assert set(+(zeros - padding)) == {"2"}


def test_a_bucket_that_is_dropped_before_it_is_zeroed_leaves_no_trace():
    with Gpu().ranks(WORLD_SIZE), dirty_buckets():
        training = mixed(16, 48, 16, 48)
        for _ in range(2):
            training.step()
            with training.model.no_sync():
                training.model(torch.randn(2, WIDTH)).square().mean().backward()
            training.model.zero_grad()
        training.step()


KEEPS_PLACES = ("gathered()", "an evaluation", "a save", "a load", "no_sync")


@pytest.mark.parametrize(
    ("event", "options"),
    [
        pytest.param(event, options, id=f"{event}-{options}", marks=pytest.mark.slow if options else ())
        for event in EVENTS
        for options in ({}, {"prefetch": 2}, *[{"in_backward": True}] * (event not in NOT_IN_BACKWARD))
    ],
)
@pytest.mark.sample(2)
def test_weights_come_to_rest_again_after_anything_else(event, options):
    with Gpu().ranks(WORLD_SIZE), places() as now:
        training = Training(**options)
        for _ in range(3):
            now.clear()
            training.step()
        places_before, before = list(now), held(training.model, "gather buffers")
        EVENTS[event](training)
        training.step()
        steps = []
        for _ in range(3):
            now.clear()
            training.step()
            steps.append(list(now))
        assert steps[0] == steps[1] == steps[2]
        assert event not in KEEPS_PLACES or steps[0] == places_before
        assert held(training.model, "gather buffers") == before
        assert held(training.model, "gradient buckets") == 0


def test_a_buffer_that_is_viewed_is_not_used_again():
    with Gpu().ranks(WORLD_SIZE), places() as now:
        training, kept = Training(), []
        training.step(2)
        handle = block_of(training).register_forward_hook(lambda module, *_: kept.append(module.rise.weight.view(-1)))
        with pytest.warns(EscapedViewWarning):
            training.step()
        handle.remove()
        value, ours = kept[0].clone(), kept[0].untyped_storage().data_ptr()
        now.clear()
        training.step(3)
        assert ours not in {place for _, place in now}
        assert torch.equal(kept[0], value)
        with_it = held(training.model, "gather buffers")
        block = next(unit.nbytes for unit in units(training.model) if not unit.is_root)
        kept.clear()
        assert held(training.model, "gather buffers") == with_it - block


def test_saved_weights_are_checked_again_once_no_view_of_a_kept_buffer_is_left():
    with Gpu().ranks(WORLD_SIZE):
        training, kept = Training(prefetch=0), []
        handle = block_of(training).register_forward_hook(lambda module, *_: kept.append(module.rise.weight.view(-1)))
        following = block_of(training, 3).register_forward_pre_hook(lambda *_: kept.clear())
        training.step()  # the view is gone before its buffer is given to the next block
        handle.remove()
        following.remove()
        assert not any(unit.escapes for unit in units(training.model))


def test_a_model_of_one_unit_keeps_nothing():
    with Gpu().ranks(WORLD_SIZE):
        model = ShardLite(nn.Linear(WIDTH, WIDTH))
        optimizer = AdamW(model.parameters())
        take_step(optimizer, model(torch.randn(2, WIDTH)).sum())
        assert held(model, "gather buffers") == held(model, "gradient buckets") == 0


@pytest.mark.parametrize(("options", "blocks"), [({"prefetch": 2}, 3), ({"reshard_after_forward": False}, 0)])
def test_what_is_kept_is_counted(options, blocks):
    """Units that stay until their backward are freed afterwards."""
    with Gpu().ranks(WORLD_SIZE):
        training = Training(**options)
        training.step(2)
        root, block, *_ = sorted(units(training.model), key=lambda unit: not unit.is_root)
        assert held(training.model, "gather buffers") == blocks * block.nbytes + root.nbytes
        assert held(training.model, "gradient buckets") == 0


@pytest.mark.stages(1, 3)
def test_a_model_that_is_deleted_frees_what_it_kept(stage):
    with Gpu().ranks(WORLD_SIZE):
        training = Training(stage=stage)
        training.step()
        ledger = training.model.ledger
        memory = [weakref.ref(each.untyped_storage()) for each in spare(training.model)]
        assert memory or stage < 3
        del training
        gc.collect()
        assert not [each for each in memory if each() is not None]
        assert not {purpose: nbytes for purpose, nbytes in ledger.current().items() if "bu" in purpose and nbytes}


def test_two_models_have_buffers_of_their_own():
    with Gpu().ranks(WORLD_SIZE):
        first, second = Training(), Training()
        for training in (first, second, first, second):
            training.step()
        ours, theirs = ({free.data_ptr() for free in spare(each.model)} for each in (first, second))
        assert ours
        assert not ours & theirs


def test_what_is_kept_is_memory_of_the_transport_that_sends_it():
    """Gather buffers of blocks and of the root, buckets, and where reductions arrive."""
    asked: Counter[Transport] = Counter()
    empty = NcclTransport.empty_persistent

    def noting(transport: NcclTransport, nbytes: int, device: torch.device) -> Tensor:
        asked[transport] += 1
        return empty(transport, nbytes, device)

    with Gpu().ranks(WORLD_SIZE), mock.patch.object(NcclTransport, "empty_persistent", noting):
        training = Training()
        training.step(3)
        shared = context(training.model)
        assert asked == {shared.transport: 2 + 1, shared.reducing[0]: 3 * len(units(training.model)) + 1}


# ---- bits -----------------------------------------------------------------------------------------------------------


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let pools keep buffers on a CPU, and gradients be copied on the queue. For transports that send any memory."""
    init = BufferPolicy.__init__

    def keeping(self: Any, units: Any, order: Any, make: Any, *, prefetch: int, keeps: bool) -> None:
        del make, keeps
        init(self, units, order, on_the_host, prefetch=prefetch, keeps=True)

    def on_the_host(nbytes: int, kept: bool) -> Buffer:
        return Buffer(torch.empty(nbytes, dtype=torch.uint8), kept=kept)

    with mock.patch.object(BufferPolicy, "__init__", keeping), mock.patch.object(ThreadQueue, "on_stream", True):
        yield


def on_tokens(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randint(0, VOCABULARY, (2, 5), generator=turn.generator())).float().square().mean()


def untied() -> LanguageModel:
    return LanguageModel(blocks=4, tied=False)


BITS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage, "route": Route(transport="p2p")} for stage in (2, 3)},
    "collectives": {"route": Route(transport="collectives")},
    "no prefetch": {"route": Route(transport="p2p"), "prefetch": 0},
    "direct": {"route": Route(transport="p2p", algorithm="direct"), "prefetch": 2},
}


@pytest.mark.parametrize("name", [slow(n) if n in ("stage 2", "no prefetch") else n for n in BITS])
def test_bits_are_those_of_the_twin(group: Any, name: str) -> None:
    with as_on_a_gpu():
        pair = Pair(untied, group, **BITS[name])
    assert reducer(pair.model).on_stream
    for step in range(4):
        pair.step(on_tokens, ("local", "step") if step == 2 else ("step",), clip=0.1 if step == 3 else None)
    with pair.model.gathered():
        pass
    pair.evaluate(on_tokens)
    pair.step(on_tokens)
    assert spare(pair.model) or BITS[name].get("stage", 3) < 3
