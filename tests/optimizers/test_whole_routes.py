"""Pieces travel over every transport of CPU tensors, with the same bits."""

from typing import Any

import pytest
import torch
from torch import optim

from shardlite import Route, ShardLite, WholeParameters
from tests.support.models.losses import on_tokens
from tests.support.models.small import LanguageModel
from tests.support.twins.sharded import Turn, same_states, slow, take_step

ROUTES = (Route(), Route(transport="p2p"), Route(transport="collectives"), Route(transport="p2p", algorithm="direct"))


@pytest.mark.ranks(3, slow(2), slow(4))
@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor])
def test_every_transport_carries_pieces(group: Any, kind: Any) -> None:
    weights = []
    for route in ROUTES:
        torch.manual_seed(0)
        model = ShardLite(LanguageModel(), group=group, route=route)
        options = {"elementwise": {"lr": 0.01}} if kind is optim.Muon else {}
        optimizer = WholeParameters(model.named_parameters(), kind, lr=0.02, **options)
        for step in range(3):
            take_step(optimizer, on_tokens(model, Turn(step, group.rank(), 0)))
        weights.append(model.full_state_dict())
    for other in weights[1:]:
        same_states("weights", other, weights[0])
