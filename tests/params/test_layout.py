"""Layouts and arenas."""

import pytest
import torch

from shardlite.params import layout as layouts
from shardlite.params.layout import ALIGN, Layout, allocate_arenas, lay_out, shared


def layout(shapes: dict[str, tuple[int, ...]], world_size: int) -> Layout:
    return lay_out(shapes.items(), dtype=torch.float32, trainable=True, world_size=world_size)


def test_equal_facts_share_a_key_until_nobody_has_it():
    key = shared(("facts", 1))
    assert shared(("facts", 1)) is key
    assert shared(("facts", 2)) is not key
    assert ("facts", 1) in layouts._keys
    del key
    assert ("facts", 1) not in layouts._keys


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


def test_layouts_with_equal_places_share_a_key_whatever_their_names():
    def laid_out(name, **options):
        given = {"dtype": torch.float32, "trainable": True, "world_size": 2} | options
        return lay_out([(f"{name}.weight", (8, 8)), (f"{name}.bias", (8,))], **given)

    key = laid_out("blocks.0").places_key
    assert laid_out("blocks.1").places_key is key
    others = {"dtype": torch.bfloat16}, {"world_size": 3}
    assert all(laid_out("blocks.0", **other).places_key is not key for other in others)


def test_arenas_are_shared_by_kind_and_do_not_overlap():
    kinds = [(torch.float32, True), (torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
    parts = allocate_arenas(kinds, [64] * 4, torch.device("cpu"))
    addresses = [part.untyped_storage().data_ptr() for part in parts]
    assert addresses[0] == addresses[2]
    assert len(set(addresses)) == 3
    assert [part.numel() for part in parts] == [64] * 4
    assert parts[2].storage_offset() == 64
    assert [part.dtype for part in parts] == [dtype for dtype, _ in kinds]
