"""`Precision`: each dtype is used where documented, to the bit. The twin's docstring shows the data flow.

Legend: `W` ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import LayoutError, Precision, ShardLite
from tests.support.models.losses import BF16, MODELS, on_rows, on_tokens
from tests.support.models.small import MLP, LanguageModel, MixedDtypes
from tests.support.twins.sharded import Pair, Turn, local_parts, same_bits, same_states, slow, some_stages

BF16_WIRE = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)

CASES: Sequence[Any] = [
    ("plain", BF16, 2),
    slow("plain", BF16, 4),
    slow("plain", BF16_WIRE, 2),  # three ranks below
    slow("plain", BF16_WIRE, 4),
    slow("plain", Precision(reduce=torch.bfloat16), 3),  # "mixed" below
    ("plain", Precision(compute=torch.bfloat16, output=torch.float32), 3),
    ("checkpointed", BF16_WIRE, 3),
    slow("frozen", BF16, 4),
    ("frozen", BF16, 2),
    slow("frozen", BF16_WIRE, 3),
    ("bf16", BF16, 3),
    ("bf16", Precision(compute=torch.float32), 2),
    ("mixed", Precision(reduce=torch.bfloat16), 3),
    ("plain", BF16, 1),
    ("frozen", BF16_WIRE, 1),
]


@pytest.mark.parametrize(
    ("name", "precision", "group"), CASES, ids=lambda x: x if isinstance(x, str) else None, indirect=["group"]
)
@pytest.mark.sample(5)
def test_training_follows_the_twin_of_its_precision(group: Any, name: str, precision: Precision) -> None:
    """With clipping and accumulation, whose sums have the dtype of the wire."""
    make, loss = MODELS[name]
    for stage in some_stages(1, 3):
        pair = Pair(make, group, stage=stage, precision=precision)
        pair.step(loss)
        pair.step(loss, ("local", "local", "step"), clip=0.01)
        pair.step(loss, ("local", "sharded", "step"), clip=0.01)
        same_states(f"stage {stage}", pair.model.full_state_dict(), pair.twin.state_dict())


# ---- full parameters ------------------------------------------------------------------------------------------------


def keeps_masters(group: Any, stage: int) -> None:
    """Body of a rank: a state dict has the masters, whose digits bf16 cannot hold, and restores them."""
    pair = Pair(LanguageModel, group, stage=stage, precision=BF16)
    pair.step(on_tokens)
    saved = pair.model.full_state_dict()
    masters = pair.twin.state_dict()
    same_states("full_state_dict()", saved, masters)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    pair.model(torch.zeros(1, 2, dtype=torch.int64))  # full weights that a load has to make stale
    pair.model.load_full_state_dict({name: value + 1 for name, value in saved.items()})
    for name, value in pair.model.full_state_dict().items():
        same_bits(f"{name!r}, loaded", value, saved[name] + 1)
    pair.model.load_full_state_dict(saved)
    pair.step(on_tokens)


def narrow(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.bfloat16() for name, value in weights.items()}


def writes_some(group: Any, stage: int) -> None:
    """Body of a rank: writing some elements of bf16 weights leaves all digits of the others' masters."""
    model = ShardLite(MLP([7, 33, 5]), group=group, stage=stage, units=nn.Linear, precision=BF16)
    expected = model.full_state_dict()
    names = [name for name, _ in model.module.named_parameters()]
    with model.gathered(), torch.no_grad():
        same_states("inside", dict(model.module.named_parameters()), narrow(expected))
    same_states("only read", model.full_state_dict(), expected)
    with model.gathered(*names[:2]), torch.no_grad():
        for name in names[:2]:
            param = model.module.get_parameter(name)
            param.view(-1)[1::3] = 0.1
            expected[name].view(-1)[1::3] = torch.tensor(0.1).bfloat16().float()
    same_states("written", model.full_state_dict(), expected)
    model(torch.zeros(1, 7))
    with model.gathered():
        same_states("gathered again", dict(model.module.named_parameters()), narrow(expected))


def keeps_frozen(group: Any, stage: int) -> None:
    """Body of a rank: frozen parameters are kept as they were wrapped, and cast like the others where they are used."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        module = MLP([7, 33, 5])
        module[0].requires_grad_(False).to(dtype)
        original = {name: param.detach().clone() for name, param in module.named_parameters()}
        model = ShardLite(module, group=group, stage=stage, units=nn.Linear, precision=BF16)
        kept = {"0.weight": dtype, "0.bias": dtype, "2.weight": torch.float32, "2.bias": torch.float32}
        assert {name: shard.dtype for name, shard in model.named_parameters()} == kept
        on_rows(model, Turn(0, 0, 0)).backward()
        with model.gathered():
            same_states("gathered", dict(model.module.named_parameters()), narrow(original))
        same_states("state", model.full_state_dict(), original)
        same_states("shards", dict(model.named_parameters()), local_parts(model, original))
        assert all((shard.grad is None) == ("0." in name) for name, shard in model.named_parameters())


@pytest.mark.parametrize("body", [keeps_masters, writes_some, keeps_frozen])
@pytest.mark.stages(1, 3)
@pytest.mark.ranks(3)
def test_masters_keep_all_their_digits(group, body, stage):
    body(group, stage)


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute": torch.int32}, r"Precision: compute must be one of None, torch\.float32, .*; got torch\.int32"),
        ({"compute": "bf16"}, r"Precision: compute must be one of .*; got 'bf16'"),
        ({"reduce": torch.int64}, r"Precision: reduce must be one of torch\.float32, .*; got torch\.int64"),
        ({"reduce": torch.float64}, r"Precision: reduce must be one of .*; got torch\.float64"),
        ({"reduce": None}, r"Precision: reduce must be one of .*; got None"),
        ({"master": torch.bfloat16}, r"Precision: master must be one of torch\.float32, split24; got torch\.bfloat16"),
        ({"output": torch.complex64}, r"Precision: output must be one of .*; got torch\.complex64"),
        *(
            ({"compute": compute, "master": "split24"}, r'"split24" keeps .* requires compute=torch\.bfloat16')
            for compute in (None, torch.float32, torch.float16)
        ),
    ],
)
def test_wrong_dtypes_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Precision(**options)


def test_fp64_parameters_are_not_made_less_in_silence(group: Any) -> None:
    with pytest.raises(LayoutError, match=r"'0\.0\.wide' is torch\.float64.*\.float\(\).*do not set `compute`"):
        ShardLite(MixedDtypes(), group=group, precision=BF16)
    ShardLite(MixedDtypes().float(), group=group, precision=BF16)


# ---- autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_autocast_gives_the_bits_of_a_twin_under_autocast(group: Any, reentrant: bool | None) -> None:
    """In one context around each forward, and in one around all passes."""

    def cast(model: Callable[..., Any], turn: Turn) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return on_tokens(model, turn)

    for stage in some_stages(0, 3):
        pair = Pair(lambda: LanguageModel(reentrant=reentrant), group, stage=stage)
        pair.step(cast, ("local", "step"))
        pair.step(cast, clip=0.01)
        with torch.autocast("cpu", torch.bfloat16):
            pair.backward(on_tokens, ("sharded",))
        pair.step(cast, clip=0.01)
