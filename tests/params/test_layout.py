"""Layouts, arenas and the cutting of a model into units."""

import pytest
import torch
from torch import nn

from shardlite import LayoutError
from shardlite.build.partition import partition_module
from shardlite.params.layout import ALIGN, Layout, allocate_arenas, lay_out, zeros_on


def layout(shapes: dict[str, tuple[int, ...]], world_size: int) -> Layout:
    return lay_out(shapes.items(), dtype=torch.float32, trainable=True, world_size=world_size)


def test_a_layout_written_out():
    planned = layout({"weight": (5, 7), "bias": (5,), "scale": ()}, world_size=2)
    assert [(slot.name, slot.start, slot.stop) for slot in planned.slots] == [
        ("weight", 0, 35),
        ("bias", 64, 69),
        ("scale", 96, 97),
    ]
    assert (planned.shard_numel, planned.full_numel) == (64, 128)
    assert planned.slots[0].within(*planned.shard_range(0)) == (0, 35)
    assert planned.slots[0].within(*planned.shard_range(1)) == (0, 0)
    assert planned.slots[1].within(*planned.shard_range(1)) == (0, 5)
    assert planned.slots[2].within(*planned.shard_range(1)) == (32, 33)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_every_element_is_on_exactly_one_rank(world_size):
    planned = layout({"a": (33, 31), "b": (1,), "c": (2, 3, 5), "d": (), "e": (0, 4)}, world_size)
    assert planned.shard_numel % ALIGN == 0
    for slot in planned.slots:
        assert slot.start % ALIGN == 0
        parts = [slot.within(*planned.shard_range(rank)) for rank in range(world_size)]
        assert sum(stop - first for first, stop in parts) == slot.numel
        assert all(0 <= first <= stop <= planned.shard_numel for first, stop in parts)


def test_cuts_are_handed_on_where_shards_differ_only():
    planned = layout({"weight": (5, 7), "bias": (5,), "scale": ()}, world_size=2)
    assert planned.uneven_cuts is None
    assert planned.only([0, 1], torch.float32).uneven_cuts == (0, 64, 96)
    assert planned.only([0, 2], torch.float32).uneven_cuts == (0, 64, 96)
    assert planned.only([1, 2], torch.float32).uneven_cuts == (0, 0, 64)


def test_arenas_are_shared_by_kind_and_do_not_overlap():
    kinds = [(torch.float32, True), (torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
    parts = allocate_arenas(kinds, [64] * 4, zeros_on(torch.device("cpu")))
    addresses = [part.untyped_storage().data_ptr() for part in parts]
    assert addresses[0] == addresses[2]
    assert len(set(addresses)) == 3
    assert [part.numel() for part in parts] == [64] * 4
    assert parts[2].storage_offset() == 64
    assert [part.dtype for part in parts] == [dtype for dtype, _ in kinds]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Language(nn.Module):
    """A decoder: `tied` shares the table with the head, `vocabulary` sets how large they are."""

    def __init__(self, *, vocabulary: int, tied: bool, depth: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, vocabulary, bias=False)
        if tied:
            self.head.weight = self.table.weight


def unit_names(model: nn.Module, policy: object = None) -> list[str]:
    return [plan.name for plan in partition_module(model, policy) if plan.params]


def test_automatic_units_of_language_models():
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert unit_names(Language(vocabulary=500, tied=True)) == ["", *blocks]
    assert unit_names(Language(vocabulary=500, tied=False)) == ["", "table", *blocks, "head"]
    assert unit_names(Language(vocabulary=20, tied=False)) == ["", *blocks]  # small tables stay with the root


def test_automatic_units_of_encoder_and_decoder():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32), 2)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    assert unit_names(model) == [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    ]


def test_automatic_units_of_sequences():
    mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    assert unit_names(mlp) == ["0", "2", "4"]
    stages = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Linear(16, 2)
    )
    assert unit_names(stages) == ["", "1", "2"]
    assert unit_names(nn.Linear(4, 4)) == [""]


def test_policies():
    model = Language(vocabulary=500, tied=True)
    assert unit_names(model, Block) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert unit_names(model, (Block, nn.LayerNorm)) == ["", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert unit_names(model, lambda name, module: name == "blocks.1") == ["", "blocks.1"]
    with pytest.raises(LayoutError, match="no module of this class"):
        partition_module(model, nn.LSTM)
    with pytest.raises(LayoutError, match="must be a module class"):
        partition_module(model, "Block")


def test_tied_weights_belong_to_what_is_around_all_of_their_places():
    model = Language(vocabulary=500, tied=True)
    names = {plan.name: list(plan.params.values()) for plan in partition_module(model, (nn.Embedding, nn.Linear))}
    assert "table.weight" in names[""]
    shared = nn.Sequential(Block(), Block())
    shared[1].up = shared[0].up
    names = {plan.name: list(plan.params.values()) for plan in partition_module(shared, Block)}
    assert names[""] == ["0.up.weight", "0.up.bias"]
    assert names["1"] == ["1.down.weight", "1.down.bias"]


def test_a_block_that_is_in_the_list_twice_is_one_unit():
    block = Block()
    assert unit_names(nn.Sequential(block, Block(), block), Block) == ["0", "1"]


def test_nested_units():
    model = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    parts = {plan.name: len(plan.params) for plan in partition_module(model, lambda name, _: name in ("0", "0.1"))}
    assert parts == {"": 4, "0": 4, "0.1": 4}
