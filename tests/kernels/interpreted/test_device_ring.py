"""The rings that kernels walk, in the interpreter, against their references: equal to the bit.

Ranks take turns in one process, so that they overtake each other everywhere. One test has processes and shared memory.
"""

import pytest
import torch
from shardlite_kernels.device_ring import ring_reduce_adamw, ring_reduce_scatter
from shardlite_kernels.signals import Peers, ring_failure

from tests.kernels.adamw_cases import FORMS, mixed_table, random_state
from tests.kernels.interpreted.ring_ranks import (
    launches,
    launches_of_a_process,
    launches_without,
    numbers,
    own_memory,
    peers_of,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
worlds = pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
seeds = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])

# Elements of a segment, dtypes of parts, of what is sent and of the result, divisor. A message has 16384 elements at
# least, so lengths are of one program, of both, and of batches that are not full.
SCATTERS = [
    (5, FP32, FP32, FP32, 1),
    (16384, FP32, FP32, FP32, 2),
    (100_005, FP32, FP32, FP32, 3),
    (40_000, BF16, FP32, BF16, 4),
    (150_000, BF16, BF16, FP32, 1),
    (40_001, FP16, FP32, FP32, 3),
]


@worlds
@seeds
def test_launch_after_launch_of_all_kinds_and_lengths(world, seed):
    """The same slots are cut in another way by each; every rank is late once and again."""
    cases = [("scatter", case) for case in (*SCATTERS, *reversed(SCATTERS))]
    launches(world, cases, late=(0, 1, 3, 2), seed=seed)


@pytest.mark.parametrize("shape", [{"programs": 1}, {"programs": 1, "depth": 5}, {"depth": 3, "slot_nbytes": 1 << 18}])
def test_one_program_more_slots_and_messages_of_several_blocks(shape):
    cases = [("scatter", (200_001, FP32, FP32, FP32, 3)), ("scatter", (150_001, BF16, BF16, FP32, 1))]
    launches(3, cases, late=(0, 1), **shape)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_last_hop_as_a_step_of_adamw(world):
    """In each format."""
    given = (20_005, FP32, FP32, False), (40_000, BF16, FP32, True), (70, FP16, BF16, False)
    cases = [("step", (form, *given[i % 3])) for i, form in enumerate(FORMS)]
    launches(world, cases, late=(0, 1, 2, 3))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_rank_that_does_not_step_meets_those_that_do(dtype):
    """Their messages are the same."""
    launches(3, [("either", (FORMS[0], 100_005, dtype, dtype))] * 2, late=(0, 1))


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("world", [2, 4])
def test_between_processes_over_shared_memory(cluster, tmp_path, world):
    cases = [("scatter", SCATTERS[4]), ("step", (FORMS[-1], 20_005, FP32, FP32, False))]
    cluster.check(launches_of_a_process, world, tmp_path, cases, late=(0, 1))


@pytest.mark.parametrize(("world", "programs"), [(2, 1), (3, 2), (4, 1)])
def test_a_rank_that_never_comes_is_an_error_on_all_others_and_nothing_hangs(world, programs):
    """And while there is one nothing is launched: no rank has said that it began the third launch."""
    said, epochs = launches_without(world, world - 1, programs)
    for first, second, third in said[:-1]:
        assert first is None
        assert second.startswith("epoch 2, step ")
        assert third == second
    assert said[-1] == (None, None, None)
    assert max(epochs) == 2
    # The rank before the absent one could send nothing.
    assert said[world - 2][1] == "epoch 2, step 0: the next rank freed no slot"
    if world > 2:  # the one after it could, but got nothing
        assert said[0][1] == "epoch 2, step 1: no message arrived from the previous rank"


@pytest.fixture
def alone():
    """Rank 0 of two, whose neighbour is this test: its flags are set by hand."""
    given = numbers(programs=1, depth=3, limit=20)
    slots, flags = memory = own_memory(2, given)
    slots[1].fill_(-1)
    yield peers_of(0, memory, given), slots[1].view(3, -1), flags[0]
    del memory


def launch(peers, epoch=1, messages=4):
    numel = messages * 16384
    ring_reduce_scatter(torch.empty(numel), torch.zeros(2 * numel), peers, epoch=epoch)


def written(slots):
    """Which slots were written to."""
    return [bool((slot != -1).any()) for slot in slots]


def test_nothing_is_written_before_the_rank_after_has_begun(alone):
    peers, slots, _ = alone
    launch(peers)
    assert ring_failure(peers.error) == "epoch 1, step 0: the next rank freed no slot"
    assert written(slots) == [False, False, False]


@pytest.mark.parametrize(("read", "in_slots"), [(0, [0, 1, 2]), (1, [3, 1, 2])])
def test_a_slot_is_not_written_again_before_it_was_read(alone, read, in_slots):
    """Everything comes at once from a neighbour that itself reads `read` messages and then no more."""
    peers, slots, flags = alone
    flags[0] = (1 << 32) + 4
    flags[16] = (1 << 32) + read
    numel = 4 * 16384
    numbers = torch.arange(4).repeat_interleave(16384).float()  # of messages
    ring_reduce_scatter(torch.empty(numel), torch.cat([torch.zeros(numel), numbers]), peers, epoch=1)
    expected = "epoch 1, step 0: the next rank freed no slot" if read == 0 else None
    assert ring_failure(peers.error) == expected
    assert slots.view(torch.float32)[:, 0].tolist() == in_slots


@pytest.mark.parametrize("cell", [0, 16])
def test_a_neighbour_in_another_launch_is_noticed(alone, cell):
    peers, _, flags = alone
    flags[[0, 16]] = (5 << 32) + 1
    flags[cell] = 6 << 32
    launch(peers, epoch=5, messages=1)
    assert ring_failure(peers.error) == f"epoch 5, step {0 if cell else 1}: a neighbour is in another epoch"


def test_flags_of_earlier_launches_are_no_news(alone):
    peers, slots, flags = alone
    flags[[0, 16]] = (5 << 32) + 1000
    launch(peers, epoch=6)
    assert ring_failure(peers.error) == "epoch 6, step 0: the next rank freed no slot"
    assert written(slots) == [False, False, False]


def test_the_first_error_stays_and_nothing_is_done_any_more(alone):
    peers, slots, flags = alone
    launch(peers)
    flags[[0, 16]] = (2 << 32) + 4
    launch(peers, epoch=2)
    assert ring_failure(peers.error) == "epoch 1, step 0: the next rank freed no slot"
    assert written(slots) == [False, False, False]


def test_a_step_that_failed_changes_no_state(alone):
    peers, _, flags = alone
    flags[16] = 1 << 32
    state = random_state(("whole", "fp32"), 1000, seed=0)
    before = state.clone()
    ring_reduce_adamw(state, torch.ones(2000), mixed_table(1000), peers, epoch=1)
    assert ring_failure(peers.error) == "epoch 1, step 1: no message arrived from the previous rank"
    assert all(torch.equal(new, old) for new, old in zip(state.tensors(), before.tensors(), strict=True))


def test_of_nothing_nothing_is_told(alone):
    peers, _, _ = alone
    ring_reduce_scatter(torch.empty(0), torch.empty(0), peers, epoch=1)
    assert ring_failure(peers.error) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"world_size": 1}, "a ring needs at least 2 ranks, got rank 0 of 1"),
        ({"rank": 2}, "got rank 2 of 2"),
        ({"programs": 0}, "programs must be from 1 to 65536, got 0"),
        ({"depth": 1}, "depth must be from 2 to 1024, got 1"),
        ({"limit": 0}, "limit must be from 1 to 2147483647, got 0"),
        ({"slot_nbytes": 100}, "slot_nbytes must be a power of two and at least 16, got 100"),
        ({"slot_nbytes": 1 << 15}, "a slot of 32768 bytes is too small for 16384 elements of 4 bytes"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots must have 2 elements on cpu, got 3"),
        ({"flags": torch.zeros(2)}, "flags must be int64, got torch.float32"),
        ({"error": torch.zeros((), dtype=torch.int64)}, "error must be 1-D and contiguous, got shape ()"),
    ],
)
def test_peers_that_do_not_go_together(alone, changed, said):
    fields = {name: getattr(alone[0], name) for name in Peers.__dataclass_fields__} | changed
    numel = 100 * fields["world_size"]
    with pytest.raises(ValueError, match="ring_reduce_scatter: ") as error:
        ring_reduce_scatter(torch.empty(100), torch.empty(numel), Peers(**fields), epoch=1)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"full": torch.empty(99)}, "full must have 100 elements"),
        ({"full": torch.empty(100, dtype=torch.int32)}, "full must be fp32, bf16 or fp16, got torch.int32"),
        ({"wire": torch.float64}, "wire must be fp32, bf16 or fp16, got torch.float64"),
        ({"out": torch.empty(50, dtype=torch.float64)}, "out must be fp32, bf16 or fp16, got torch.float64"),
        ({"out": torch.empty(100)[::2]}, "out must be 1-D and contiguous"),
        ({"divisor": 0}, "divisor must be from 1 to 16777216, got 0"),
        ({"epoch": 0}, "epoch must be from 1 to 2147483647, got 0"),
        ({"epoch": 2**31}, "epoch must be from 1 to 2147483647, got 2147483648"),
    ],
)
def test_what_cannot_be_summed(alone, changed, said):
    given = {"out": torch.empty(50), "full": torch.empty(100), "epoch": 1} | changed
    with pytest.raises(ValueError, match="ring_reduce_scatter: ") as error:
        ring_reduce_scatter(given.pop("out"), given.pop("full"), alone[0], **given)
    assert said in str(error.value)


def test_what_cannot_be_stepped(alone):
    peers, *_ = alone
    state = random_state(("whole", "fp32"), 64, seed=0)
    with pytest.raises(ValueError, match="ring_reduce_adamw: full must have 128 elements"):
        ring_reduce_adamw(state, torch.empty(64), mixed_table(64), peers, epoch=1)
    with pytest.raises(ValueError, match="ring_reduce_adamw: rows must have 2 elements"):
        ring_reduce_adamw(state, torch.empty(128), mixed_table(32), peers, epoch=1)
