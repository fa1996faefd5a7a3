"""`memory_limit`: a model that cannot fit is refused on all ranks before memory is allocated, with a remedy."""

import pytest
import torch
from torch import nn

from shardlite import AdamW, LayoutError, MemoryLimit, Precision, ShardLite

WIDTH, BLOCKS = 64, 6
BLOCK = WIDTH * WIDTH + WIDTH
NUMEL = BLOCKS * BLOCK


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])


def test_a_model_that_cannot_fit_is_refused_with_what_would(group):
    module = net()
    before = [param.data_ptr() for param in module.parameters()]
    with pytest.raises(LayoutError, match="memory_limit: a rank would hold") as error:
        ShardLite(module, group=group, memory_limit=NUMEL)
    said = str(error.value)
    for words in (
        "parameters",
        "optimizer state",
        "What to change",
        "AdamW(in_backward=True)",
        'state="int8"',
        "ranks",
    ):
        assert words in said
    assert "stage=3" not in said
    assert [param.data_ptr() for param in module.parameters()] == before, "the module was changed"
    with pytest.raises(LayoutError, match="memory limit"):  # ranks have different ones
        ShardLite(net(), group=group, memory_limit=1 << 30 if group.rank() else None)


def test_what_fits_is_wrapped_and_holds_no_more(group):
    """Half of parameters, two moments and gradients each; at the end of a backward two buckets, and step counts."""
    states = 4 * 4 * NUMEL // 2 + 4 * 2 * BLOCKS
    model = ShardLite(net(), group=group, memory_limit=states + 5 * 4 * BLOCK)
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    held = sum(
        held.now
        for purpose, held in model.memory().items()
        if purpose in ("parameters", "optimizer state", "gradients")
    )
    assert held <= states + 4 * 1024 * 2
    with pytest.raises(LayoutError, match="memory_limit"):
        ShardLite(net(), group=group, memory_limit=states)


def test_the_optimizer_and_the_activations_may_be_named(group):
    """The same limit refuses the standard optimizer and takes the compact one; activations count."""
    compact = Precision(compute=torch.bfloat16, master="split24")
    nbytes = 5 * NUMEL
    with pytest.raises(LayoutError, match="fits"):
        ShardLite(net(), group=group, precision=compact, memory_limit=nbytes)
    small = {"state": "int8", "in_backward": True}
    ShardLite(net(), group=group, precision=compact, memory_limit=MemoryLimit(nbytes=nbytes, **small))
    limit = MemoryLimit(nbytes=nbytes, activations=nbytes, **small)
    with pytest.raises(LayoutError, match="activations"):
        ShardLite(net(), group=group, precision=compact, memory_limit=limit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbytes": 0}, "must be above 0"),
        ({"nbytes": 1, "activations": -1}, "at least 0"),
        ({"nbytes": 1, "state": "fp8"}, "must be one of fp32, bf16, int8"),
    ],
)
def test_a_limit_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryLimit(**options)


def test_a_limit_is_a_number_of_bytes_or_a_record():
    with pytest.raises(TypeError, match="a number of bytes or a MemoryLimit, got '80GB'"):
        ShardLite(net(), memory_limit="80GB")  # type: ignore[arg-type]
