import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlite.telemetry.ledger import Ledger
from shardlite.telemetry.meter import Meter

KIB = 256  # fp32 elements


@pytest.fixture(autouse=True)
def _no_garbage():
    gc.collect()


def grown(meter: Meter, before: int) -> tuple[int, int]:
    """Bytes alive and at most, above `before`."""
    return meter.live - before, meter.peak - before


def test_tensors_that_exist_at_entry_count():
    kept = torch.empty(5 * KIB)
    with Meter() as meter:
        before = meter.live
        del kept
        assert meter.live == before - 5120


def test_a_gradient_that_python_never_saw_counts_at_entry():
    weight = nn.Parameter(torch.ones(3 * KIB))
    weight.sum().backward()
    with Meter() as meter:
        before = meter.live
        weight.grad = None
        assert meter.live == before - 3072


def test_in_place_operators_and_views_make_no_bytes():
    with Meter() as meter:
        before = meter.live
        x = torch.zeros(4 * KIB)
        x.add_(1).mul_(2)
        row = x.view(4, KIB)[1]
        row.zero_()
        torch.add(x, 1, out=x)
        assert grown(meter, before) == (4096, 4096)
        del x
        assert meter.live - before == 4096
        del row
        assert meter.live == before


def test_a_result_counts_while_its_arguments_live():
    with Meter() as meter:
        before = meter.live
        x = torch.ones(KIB)
        x = x * 2  # for a moment there are two
        x = x * 2
        assert grown(meter, before) == (1024, 2048)


def test_memory_made_outside_operators_counts_from_its_first_use():
    raw = bytearray(2048)
    with Meter() as meter:
        before = meter.live
        x = torch.frombuffer(raw, dtype=torch.float32)
        x.zero_()
        assert grown(meter, before) == (2048, 2048)


def test_resizing_a_tensor_or_its_storage_counts():
    original = torch.UntypedStorage.resize_
    with Meter() as meter:
        before = meter.live
        x = torch.empty(KIB)
        x.resize_(3 * KIB)
        assert grown(meter, before) == (3072, 3072)
        x.untyped_storage().resize_(0)
        assert meter.live == before
        x.untyped_storage().resize_(4096)
        assert grown(meter, before) == (4096, 4096)
    assert torch.UntypedStorage.resize_ is original


def test_forward_backward_and_step_count_to_the_byte():
    """One weight of 16x16 (1 KiB) and 8 rows of 16 (0.5 KiB)."""
    weight, x = nn.Parameter(torch.randn(16, 16)), torch.randn(8, 16)
    optimizer = torch.optim.AdamW([weight], fused=True)
    with Meter() as meter:
        before = meter.live
        loss = (x @ weight).relu().pow(2).sum()
        # relu and pow save the same relu result; the product and the squares are gone; the loss is a scalar
        assert meter.live - before == 512 + 4
        loss.backward()
        assert meter.live - before == 4 + 1024
        optimizer.step()
        assert meter.live - before == 4 + 1024 + 2 * 1024 + 4  # two moments and the step count
        optimizer.zero_grad()
        assert meter.live - before == 4 + 2 * 1024 + 4


def test_checkpointing_lowers_the_peak_and_leaves_nothing():
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(8)])
    x = torch.randn(128, 64, requires_grad=True)

    def block(y: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            y = torch.tanh(layer(y))
        return y

    def recomputed_block(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, y, use_reentrant=False)

    peaks = []
    for forward in (block, recomputed_block):
        with Meter() as meter:
            before = meter.live
            y = forward(x)
            peaks.append(meter.peak - before)
            y.sum().backward()
            del y
            for leaf in (x, *layers.parameters()):
                leaf.grad = None
            assert meter.live == before
    assert peaks[1] < peaks[0] / 2


def test_reset_peak_starts_from_what_is_alive():
    with Meter() as meter:
        torch.empty(64 * KIB)
        meter.reset_peak()
        before = meter.live
        x = torch.empty(KIB)
        assert grown(meter, before) == (1024, 1024)
        del x


def test_the_snapshot_at_the_peak_sees_what_was_booked_right_after_it():
    ledger = Ledger()
    with Meter(on_peak=ledger.current) as meter:
        activation = torch.empty(64 * KIB)
        buffer = torch.empty(128 * KIB)  # this is the peak, and it is booked only after its operator
        ledger.track("gather buffers", buffer)
        activation.add_(1)
        del buffer
        activation.add_(1)
    assert meter.at_peak == {"gather buffers": 128 * 1024}


def test_meters_nest():
    with Meter() as outer:
        before = outer.live
        with Meter() as inner:
            x = torch.empty(KIB)
            x.untyped_storage().resize_(2048)
        assert inner.live == outer.live == before + 2048


def test_meta_and_sparse_tensors_are_left_out():
    with Meter() as meter:
        before = meter.live
        kept = torch.empty(KIB, device="meta") * 2, torch.eye(2).to_sparse()
        assert meter.live - before == 0
        del kept
