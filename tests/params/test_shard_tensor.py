"""Shards in state dicts: their boxes cover the range of elements, and computing with a part is refused."""

import copy
import io
from itertools import product
from math import prod

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardlite import LayoutError
from shardlite.params import ShardTensor
from shardlite.params.shard_tensor import boxes

SHAPES = [(), (1,), (7,), (4, 5), (5, 1), (1, 6), (3, 2, 4), (2, 3, 1, 2), (0,), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_the_elements_of_the_range_in_order(shape):
    whole = torch.arange(prod(shape)).view(shape)
    for start, stop in product(range(prod(shape) + 1), repeat=2):
        found = list(boxes(shape, start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        parts = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in found]
        elements = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        assert elements.tolist() == list(range(start, stop))


def shard(start: int = 3, stop: int = 17) -> tuple[ShardTensor, torch.Tensor]:
    local = torch.arange(start, stop, dtype=torch.float32)
    return ShardTensor(local, (4, 5), start), local


def test_it_has_the_shape_of_the_full_tensor_and_the_memory_of_the_shard():
    tensor, local = shard()
    assert tensor.shape == (4, 5)
    assert tensor.dtype == torch.float32
    assert tensor.to_local() is local
    for chunk in tensor.__create_chunk_list__():
        tensor.__get_tensor_shard__(MetadataIndex("w", chunk.offsets)).add_(100)
    assert local.tolist() == [100 + i for i in range(3, 17)]
    with pytest.raises(LayoutError, match=r"no box at \(3, 3\)"):
        tensor.box((3, 3), local)


def test_copies_are_of_the_shard():
    tensor, local = shard()
    for copied in (copy.deepcopy(tensor), tensor.clone(), tensor.to(torch.float64)):
        assert (type(copied), copied.shape, copied.start, copied.stop) == (ShardTensor, (4, 5), 3, 17)
        assert copied.to_local().data_ptr() != local.data_ptr()
        assert copied.to_local().tolist() == local.tolist()
    assert tensor.detach().to_local().data_ptr() == local.data_ptr()


def test_pickling_writes_the_elements_as_a_plain_tensor():
    file = io.BytesIO()
    torch.save({"w": shard()[0]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert type(loaded) is torch.Tensor
    assert loaded.tolist() == list(range(3, 17))


@pytest.mark.parametrize(
    "compute", [lambda x: x + 1, lambda x: x.sum(), lambda x: torch.equal(x, x), lambda x: x.mul_(2), lambda x: x[0]]
)
def test_other_computations_are_refused(compute):
    with pytest.raises(LayoutError, match=r"this rank has only a part of the tensor\. Use to_local\(\)"):
        compute(shard()[0])


def test_elements_that_are_kept_in_another_form_are_decoded_once_and_kept_on_commit():
    codes, decoded = torch.arange(4, dtype=torch.int8), []

    def decode() -> torch.Tensor:
        decoded.append(1)
        return codes.float()

    facts = {"numel": 4, "dtype": torch.float32, "device": codes.device}
    tensor = ShardTensor(decode, (2, 3), 1, **facts, encode=codes.copy_)
    assert tensor.read().tolist() == tensor.read().tolist() == [0, 1, 2, 3]
    assert len(decoded) == 2  # nothing stays
    tensor.commit()  # nothing to do
    tensor.to_local().mul_(2)
    tensor.to_local().add_(1)
    assert len(decoded) == 3
    assert codes.tolist() == [0, 1, 2, 3]
    tensor.commit()
    assert codes.tolist() == [1, 3, 5, 7]
    assert tensor.read().tolist() == [1, 3, 5, 7]
    assert "elements 1 to 5 of [2, 3]" in repr(tensor)
