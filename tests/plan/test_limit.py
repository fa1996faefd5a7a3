"""`memory_limit`: a model that cannot fit is refused on all ranks before memory is allocated, with a remedy."""

import pytest
import torch
from torch import nn

from shardlite import AdamW, LayoutError, MemoryLimit, Precision, ShardLite
from shardlite.plan import check_memory_limit
from shardlite.wrapping import Offload, Options, Plan, plan_units

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


def plan_of(blocks: int, options: Options, device: str = "cuda") -> tuple[nn.Module, Plan]:
    """Return a model on the meta device, and its plan for two ranks."""
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(blocks)])
    return module, plan_units(module, options, 2, torch.device(device))


def refused(offload: Offload | None = None, state: str = "fp32", blocks: int = 24, device: str = "cuda") -> list[str]:
    """Let a rank hold a single byte. Return the lines of the error: as asked, and what to change."""
    options = Options(offload=offload, memory_limit=MemoryLimit(nbytes=1, state=state))
    module, plan = plan_of(blocks, options, device)
    with pytest.raises(LayoutError, match="memory_limit: a rank would hold") as error:
        check_memory_limit(module, plan, options, 2)
    return str(error.value).splitlines()[1:]


def bytes_of(words: str, lines: list[str]) -> float:
    (line,) = (line for line in lines if line.strip().startswith(words))
    return float(line.split()[-2])


def test_states_on_the_host_are_suggested_on_a_gpu_only():
    """The suggestion holds: the limit that it fits is kept by the plan with `offload=True`."""
    saved = bytes_of("offload=True", refused())
    assert saved < bytes_of("as asked", refused())
    options = Options(offload=Offload(), memory_limit=MemoryLimit(nbytes=round(saved * 1e9 * 1.01)))
    check_memory_limit(*plan_of(24, options), options, 2)
    for lines in (refused(device="cpu"), refused(Offload())):
        assert not any("offload" in line for line in lines)


def test_formats_in_which_no_unit_stays_are_not_suggested():
    """A unit has 8 bytes of fp32 moments per element, and 9 with the low bits of split weights."""
    lines = refused(Offload(resident=8 * BLOCK // 2 + 512))
    assert not any("Precision" in line for line in lines)
    assert any("offload=True" in line for line in lines)


def test_a_limit_counts_what_stays_on_the_gpu():
    whole, half, none = (bytes_of("as asked", refused(share and Offload(share=share))) for share in (None, 0.5, 1.0))
    assert whole > half > none


def test_suggested_moments_are_those_that_decide_which_units_stay():
    """A unit's fp32 moments have 8 bytes per element, and int8 moments 2, so that four units stay in place of one."""
    resident = Offload(resident=2 * 8 * BLOCK // 2 - 1)
    suggested = bytes_of('AdamW(state="int8")', refused(resident))
    assert suggested == bytes_of("as asked", refused(resident, state="int8"))
