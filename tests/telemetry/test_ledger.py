import gc
import threading

import torch

from shardlite.telemetry.ledger import Ledger, format_bytes

KIB = 256  # fp32 elements


def test_a_storage_counts_once_and_until_its_last_view_dies():
    ledger = Ledger()
    full = torch.empty(4 * KIB)
    row = full[KIB : 2 * KIB].view(16, 16)
    ledger.track("gather buffers", full)
    ledger.track("gather buffers", row)
    assert ledger.current() == {"gather buffers": 4096}
    del full
    gc.collect()
    assert ledger.current() == {"gather buffers": 4096}
    del row
    assert ledger.current() == {"gather buffers": 0}
    assert ledger.peak() == {"gather buffers": 4096}


def test_a_storage_that_only_the_graph_holds_is_still_counted():
    ledger = Ledger()
    x = torch.ones(KIB, requires_grad=True)
    y = x * 2
    ledger.track("activations", y)
    loss = (y * y).sum()
    del y
    gc.collect()
    assert ledger.current()["activations"] == 1024
    loss.backward()
    assert ledger.current()["activations"] == 0


def test_a_parameter_that_changes_its_data_frees_the_old_storage():
    ledger = Ledger()
    weight = torch.nn.Parameter(torch.ones(KIB))
    ledger.track("parameters", weight)
    weight.data = torch.ones(2 * KIB)
    assert ledger.current()["parameters"] == 0


def test_purposes_peak_at_different_moments():
    ledger = Ledger()
    for purpose in ("gradients", "gather buffers", "gradients"):
        tensor = torch.empty(KIB)
        ledger.track(purpose, tensor)
        del tensor
    assert ledger.peak() == {"gradients": 1024, "gather buffers": 1024}
    assert ledger.current() == {"gradients": 0, "gather buffers": 0}


def test_tracking_again_moves_a_storage_or_takes_its_new_size():
    ledger = Ledger()
    bucket = torch.empty(KIB)
    ledger.track("gradient buckets", bucket)
    ledger.track("gradients", bucket)
    assert ledger.current() == {"gradient buckets": 0, "gradients": 1024}
    bucket.untyped_storage().resize_(0)
    ledger.track("gradients", bucket)
    assert ledger.current()["gradients"] == 0
    del bucket
    assert ledger.current()["gradients"] == 0


def test_reset_peak_starts_from_what_is_held():
    ledger = Ledger()
    kept, gone = torch.empty(10), torch.empty(15)
    for tensor in (kept, gone):
        ledger.track("gradients", tensor)
    del tensor, gone
    ledger.reset_peak()
    assert ledger.peak() == {"gradients": 40}


def test_threads_lose_no_byte():
    ledger = Ledger()

    def churn() -> None:
        for _ in range(500):
            tensor = torch.empty(8)
            ledger.track("gather buffers", tensor)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.current() == {"gather buffers": 0}


def test_format_bytes_shows_mebibytes_with_one_decimal():
    assert format_bytes(0) == "0.0 MiB"
    assert format_bytes(3 << 19) == "1.5 MiB"
