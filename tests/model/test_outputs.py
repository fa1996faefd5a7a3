"""Inputs and outputs in containers of all kinds, with and without casts, as in plain data parallel.

Legend: `B` rows of a batch, `D` width.
"""

import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shardlite import Precision
from shardlite.engine.conversions import cast_floats
from tests.support.models.hf import FOREIGN
from tests.support.models.residual import WIDTH, net
from tests.support.twins.plain import Twin
from tests.support.twins.sharded import Pair, Turn

PRECISIONS = [Precision(compute=c, output=o) for c in (None, torch.bfloat16) for o in (None, torch.float32)]


@dataclass
class Record:
    hidden: Tensor
    ids: Tensor
    loss: Tensor | None = None
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    ids: Tensor


class Named(NamedTuple):
    hidden: Tensor
    ids: Tensor


class Derived(Named):
    """Has a method beside its fields."""

    def width(self) -> int:
        return self.hidden.shape[-1]


class Dict(dict):
    """A dict of a class of its own."""


@dataclass
class Both(OrderedDict):
    """A dict whose items are attributes as well, as the outputs of several libraries are."""

    hidden: Tensor
    ids: Tensor

    def __post_init__(self) -> None:
        self["hidden"], self["ids"] = self.hidden, self.ids


def model_output(hidden: Tensor, ids: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports
        from transformers import modeling_outputs
    return modeling_outputs.BaseModelOutputWithPast(last_hidden_state=hidden, attentions=(ids, hidden))


def packed(hidden: Tensor, ids: Tensor) -> PackedSequence:
    return pack_sequence([hidden])


def first(container: Any) -> Tensor:
    return container[0]


def by_key(container: Any) -> Tensor:
    return container["hidden"]


@dataclass(frozen=True)
class Kind:
    """How to make a container of floats and integers, and how to find the floats in it."""

    make: Callable[[Tensor, Tensor], Any]
    hidden: Callable[[Any], Tensor]


KINDS = {
    "tuple": Kind(lambda hidden, ids: (hidden, [ids, hidden]), first),
    "list": Kind(lambda hidden, ids: [hidden, {"ids": ids}], first),
    "dict": Kind(lambda hidden, ids: {"hidden": hidden, "ids": ids, "none": None, "text": "a"}, by_key),
    "OrderedDict": Kind(lambda hidden, ids: OrderedDict(hidden=hidden, ids=ids), by_key),
    "defaultdict": Kind(lambda hidden, ids: defaultdict(list, hidden=hidden, ids=ids), by_key),
    "UserDict": Kind(lambda hidden, ids: UserDict(hidden=hidden, ids=ids), by_key),
    "own-dict": Kind(lambda hidden, ids: Dict(hidden=hidden, ids=ids), by_key),
    "dataclass": Kind(lambda hidden, ids: Record(hidden, ids, rest={"deep": [hidden]}), lambda r: r.rest["deep"][0]),
    "frozen-dataclass": Kind(Frozen, lambda record: record.hidden),
    "dict-and-dataclass": Kind(Both, lambda both: both["hidden"] + 0 * both.hidden),
    "NamedTuple": Kind(Named, lambda named: named.hidden),
    "derived-NamedTuple": Kind(Derived, lambda named: named.hidden[:, : named.width()]),
    "PackedSequence": Kind(packed, lambda sequence: sequence.data),
    "return-type": Kind(lambda hidden, ids: hidden[None].max(0), first),
    "ModelOutput": Kind(model_output, lambda output: output["last_hidden_state"] + 0 * output.last_hidden_state),
}


class Carries(nn.Module):
    """Reads one container and makes another one of the same kind; [B, D] -> [B, D]."""

    def __init__(self, kind: Kind, compute: torch.dtype) -> None:
        super().__init__()
        self.blocks = net(2)
        self.kind = kind
        self.compute = compute

    def forward(self, batch: Any, *, named: Any) -> Any:
        x = self.kind.hidden(batch) + self.kind.hidden(named)
        assert x.dtype == self.compute
        return self.kind.make(self.blocks(x), torch.arange(3))


@pytest.mark.parametrize("name", [pytest.param(n, marks=FOREIGN if n == "ModelOutput" else ()) for n in KINDS])
@pytest.mark.ways((2, 3))
@pytest.mark.sample(2)
def test_containers_of_inputs_and_outputs(group: Any, name: str, stage: int) -> None:
    """Without casts and with; a container keeps its class, and the caller's own keeps its dtypes."""
    kind = KINDS[name]

    def loss(model: Any, turn: Turn) -> Tensor:
        x = torch.randn(3, WIDTH, generator=turn.generator())
        batch = kind.make(x, torch.arange(3))
        inputs = batch
        if isinstance(model, Twin):  # cast here, independently of the library
            inputs = kind.make(x.to(model.module.compute), torch.arange(3))
        out = model(inputs, named=inputs)
        assert type(out) is type(batch)
        assert kind.hidden(batch).dtype == torch.float32
        hidden = kind.hidden(out)
        assert hidden.dtype == (precision.output or compute)
        return hidden.float().square().mean()

    for precision in PRECISIONS:
        compute = precision.compute or torch.float32
        pair = Pair(lambda dtype=compute: Carries(kind, dtype), group, stage=stage, precision=precision)
        pair.step(loss)
        pair.step(loss, ("local", "step"), clip=0.01)


@pytest.mark.parametrize("name", [pytest.param(n, marks=FOREIGN if n == "ModelOutput" else ()) for n in KINDS])
def test_only_floats_are_cast_and_in_a_copy(name):
    kind = KINDS[name]
    floats, ids = torch.randn(2, 3), torch.arange(3)
    container = kind.make(floats, ids)
    cast = cast_floats({"outer": (container, 1.5)}, torch.float64)["outer"]
    assert cast[1] == 1.5
    assert type(cast[0]) is type(container)
    assert kind.hidden(cast[0]).dtype == torch.float64
    assert kind.hidden(container).dtype == torch.float32
    same = cast_floats(container, torch.float32)
    torch.testing.assert_close(kind.hidden(same), kind.hidden(container), rtol=0, atol=0)


def test_what_is_no_container_is_left_alone():
    for value in (None, 1.5, "text", torch.float32, Record, object(), range(3), torch.Size([2]), {1, 2}):
        assert cast_floats(value, torch.float64) is value or cast_floats(value, torch.float64) == value
    tensors = [torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.uint8)]
    for tensor in tensors:
        assert cast_floats(tensor, torch.float64) is tensor
