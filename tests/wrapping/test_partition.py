"""Partitioning a model into units."""

import pytest
from torch import nn

from shardlite import LayoutError
from shardlite.wrapping import partition_module


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
    assert unit_names(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_automatic_units_of_sequences():
    mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    assert unit_names(mlp) == ["0", "2", "4"]
    stages = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Linear(16, 2)
    )
    assert unit_names(stages) == ["", "1", "2"]
    assert unit_names(nn.Linear(4, 4)) == [""]


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_places_of_a_list_without_a_module(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"layers": kind()})
    for place, child in enumerate([Block(), None, Block(), None]):
        model["layers"].add_module(str(place), child)
    assert unit_names(model) == unit_names(model, Block) == ["layers.0", "layers.2"]


def test_policies():
    model = Language(vocabulary=500, tied=True)
    assert unit_names(model, Block) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert unit_names(model, (Block, nn.LayerNorm)) == ["", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert unit_names(model, lambda name, module: name == "blocks.1") == ["", "blocks.1"]
    with pytest.raises(LayoutError, match="contains no module of this class"):
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
