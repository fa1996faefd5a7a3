"""Looking inside a sharded model from a test."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardlite import ShardLite


def local_parts(model: ShardLite, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut whole tensors, named like the model's parameters, into what this rank's shards hold."""
    parts = {}
    for unit in model._units:
        for flat in unit.flats:
            for row, slot in enumerate(flat.layout.slots):
                if slot.name in full:
                    parts[slot.name] = flat.part_of(row, full[slot.name].detach())
    return parts


def assert_gradients_equal(model: ShardLite, twin: nn.Module) -> None:
    """Every shard's gradient is, to the bit, its part of the twin's: valid where all ranks computed the same."""
    expected = local_parts(model, {n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
    for name, shard in model.named_parameters():
        if name not in expected:
            assert shard.grad is None, f"{name}: the twin has no gradient"
        else:
            assert shard.grad is not None, f"{name}: no gradient"
            torch.testing.assert_close(shard.grad, expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def most_buffers(model: ShardLite) -> int:
    """Return how many buffers of the (equal) blocks there were at most at once, since the last `reset_peak`."""
    block = next(unit for unit in model._units if not unit.resident)
    kept = sum(unit.nbytes for unit in model._units if unit.resident)
    return (model.ledger.peak()["gather buffers"] - kept) // block.nbytes


def gathers(model: ShardLite) -> dict[str, int]:
    """Return how often each unit has been gathered since the trace was last taken."""
    names = [event.split()[1] for event in model.trace.take() if event.startswith("gather ")]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def compare(
    module: nn.Module, loss: Callable[[nn.Module], Tensor], group: object, **options: object
) -> tuple[ShardLite, nn.Module]:
    """Run one forward and backward of a module and of its sharded copy; the gradients must be the same bits."""
    import copy

    twin = copy.deepcopy(module)
    model = ShardLite(module, group=group, **options)
    model.trace.take()
    model.ledger.reset_peak()
    loss(twin).backward()
    loss(model).backward()
    assert_gradients_equal(model, twin)
    return model, twin
