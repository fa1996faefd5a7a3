"""The option `offload`: which states are kept in host memory, and what is refused before memory is allocated."""

import warnings

import pytest
import torch
from torch import nn

from shardlite import AdamW, LayoutError, ShardLite, ShardWarning
from shardlite.wrapping import Offload, offload_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (False, None), (0.0, None), (True, Offload()), (0.5, Offload(share=0.5)), (7, Offload(resident=7))],
)
def test_what_may_be_given(given, expected):
    assert offload_of(given) == expected


@pytest.mark.parametrize("given", ["all", [0.5], torch.tensor(0.5)], ids=repr)
def test_other_types_are_refused(given):
    with pytest.raises(TypeError, match=r"offload takes True, the share .*; got"):
        offload_of(given)


@pytest.mark.parametrize("given", [1.5, -0.5, -1, float("nan")])
def test_other_numbers_are_refused(given):
    with pytest.raises(ValueError, match=r"offload must be a share from 0\.0 to 1\.0, or a number of bytes"):
        offload_of(given)


@pytest.mark.parametrize(
    ("offload", "nbytes", "expected"),
    [
        (True, [1, 2, 3], [1, 1, 1]),
        (0.5, [2, 2, 2, 2], [0, 0, 1, 1]),
        (0.4, [4, 3, 3], [0, 1, 1]),
        (0.5, [9, 1, 1, 1], [1, 0, 0, 0]),
        (5, [2, 2, 2, 2], [0, 0, 1, 1]),
        (5, [9, 2, 2, 2], [1, 0, 0, 1]),
        (100, [2, 2], [0, 0]),
        (2, [0, 2, 2], [0, 0, 1]),
    ],
)
def test_units_that_are_used_first_stay(offload, nbytes, expected):
    """As long as they fit into what may stay; a unit that does not is passed over."""
    assert offload_of(offload).choose(nbytes) == list(map(bool, expected))


@pytest.mark.parametrize("given", [0, 1])
def test_bytes_below_the_smallest_unit_are_refused(given):
    with pytest.raises(
        ValueError, match=rf"offload={given} is the number of bytes .* smallest unit has 2.*offload=True"
    ):
        offload_of(given).choose([0, 2, 4])


@pytest.mark.stages(0, 3)
def test_nothing_changes_on_a_cpu(group, stage):
    outcomes = []
    for offload in (None, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = ShardLite(net(), group=group, stage=stage, units=nn.Linear, offload=offload)
        words = [str(each.message) for each in caught if each.category is ShardWarning]
        assert words == ["offload has no effect: the model is on the cpu"] * (group.rank() == 0 and offload is True)
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "offloaded state" not in model.memory()
        outcomes.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *outcomes))


def test_ranks_that_differ_are_refused_on_all_of_them(group):
    module = net()
    before = [param.data_ptr() for param in module.parameters()]
    with pytest.raises(LayoutError, match="Offload"):
        ShardLite(module, group=group, offload=0.5 if group.rank() else True)
    assert [param.data_ptr() for param in module.parameters()] == before, "the module was changed"
