"""PyTorch layers that store or use their weights in unusual ways have the bits of plain data parallel.

Legend: `B` rows of a batch, `T` items of a row, `D` width.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from tests.support.models.residual import WIDTH, Block, net
from tests.support.models.small import run_all
from tests.support.twins.sharded import Pair, Turn, trained

Run = Callable[[Callable[..., Any], Turn], Tensor]


def rows(turn: Turn, *shape: int) -> Tensor:
    return torch.randn(*(shape or (5,)), WIDTH, generator=turn.generator())


def on_rows(model: Callable[..., Any], turn: Turn) -> Tensor:
    """[B, D]"""
    return model(rows(turn)).square().mean()


def on_sequences(model: Callable[..., Any], turn: Turn) -> Tensor:
    """[B, T, D]. The seed is for dropout."""
    torch.manual_seed(turn.generator().initial_seed())
    return model(rows(turn, 3, 4)).square().mean()


class First(nn.Module):
    """The first output of a module that has several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        return self.inner(*inputs)[0]


# ---- layers -------------------------------------------------------------------------------------------------------


class Stepwise(nn.Module):
    """Calls a cell once per item. [B, T, D] -> [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        outputs = []
        for item in x.unbind(1):
            h, c = self.cell(item, (h, c))
            outputs.append(h)
        return torch.stack(outputs, dim=1)


class Packed(nn.Module):
    """Sequences of different lengths. [B, T, D] -> [items, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([2, 4, 3]), batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed, _ = layer(packed)
        return packed.data


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class CrossAttention(nn.Module):
    """Queries, keys and values have matrices of their own, and the attention weights are used."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=8, vdim=4, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x[..., :8], x[..., 8:12])
        return x + y + weights.sum(-1, keepdim=True).cos()


class ListsAndDicts(nn.Module):
    """Its weights are in containers, which have no forward. [B, D] -> [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2)])
        self.vectors = nn.ParameterDict({"scale": nn.Parameter(torch.ones(WIDTH)), "shift": torch.zeros(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x * self.vectors["scale"] + self.vectors["shift"]


class ReadsItsChildren(Block):
    """Uses its layers' weights without calling them, one of them transposed. [B, D] -> [B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.inner.weight, self.inner.bias)
        return torch.tanh(x) @ self.inner.weight


class Siblings(nn.Module):
    """Two kinds of blocks in turns, which all have one layer in common, and one block that is in two places."""

    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(WIDTH, WIDTH)
        both = Block()
        self.down = nn.ModuleList([nn.Sequential(common, nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)])
        self.up = nn.ModuleList([Block(), both, Block(), both])

    def forward(self, x: Tensor) -> Tensor:
        return run_all((*self.down, *self.up), x)


class Bags(nn.Module):
    """[B, T] of ids -> [B, D], with bags of each kind."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        modes = ("sum", "mean") if sparse else ("sum", "mean", "max")
        self.bags = nn.ModuleList([nn.EmbeddingBag(19, WIDTH, mode=mode, sparse=sparse) for mode in modes])
        self.table = nn.Embedding(19, WIDTH, padding_idx=0, sparse=sparse)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        weighted = self.bags[0](ids, per_sample_weights=weights)
        bags = [bag(ids) for bag in self.bags[1:]]
        return self.blocks(torch.tanh(sum(bags, weighted) + self.table(ids).sum(1)))


def on_ids(model: Callable[..., Any], turn: Turn) -> Tensor:
    ids = torch.randint(0, 19, (3, 6), generator=turn.generator())
    return model(ids, torch.rand(3, 6, generator=turn.generator())).square().mean()


class Convolutions(nn.Module):
    """[B, D] as an image -> [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Conv2d(1, 5, 3, padding=1)
        self.norm = nn.GroupNorm(5, 5)
        self.back = nn.ConvTranspose2d(5, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = self.norm(self.there(x.view(-1, 1, 4, 4)).contiguous(memory_format=torch.channels_last))
        return x + self.back(torch.relu(image)).flatten(1)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Run = on_rows


LAYERS = {
    "LSTM-layers-dropout": Case(
        partial(net, 2, lambda: First(nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True))), on_sequences
    ),
    "LSTM-bidirectional-projected": Case(
        partial(net, 2, lambda: First(nn.LSTM(WIDTH, 12, proj_size=8, bidirectional=True, batch_first=True))),
        on_sequences,
    ),
    "LSTMCell": Case(partial(net, 3, Stepwise), on_sequences),
    "GRU-packed-sequences": Case(Packed, on_sequences),
    "MultiheadAttention": Case(partial(net, 3, partial(SelfAttention, dropout=0.2)), on_sequences),
    "MultiheadAttention-kdim-vdim": Case(partial(net, 3, CrossAttention), on_sequences),
    "ParameterList-ParameterDict": Case(partial(net, 3, ListsAndDicts)),
    "weights-read-by-the-parent": Case(partial(net, 3, ReadsItsChildren)),
    "shared-modules": Case(Siblings),
    "EmbeddingBag": Case(partial(Bags, sparse=False), on_ids),
    "EmbeddingBag-sparse-gradients": Case(partial(Bags, sparse=True), on_ids),
    "convolutions": Case(partial(net, 3, Convolutions)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.ways((2, 3))
def test_layers_train_and_evaluate_like_the_twins(group: Any, name: str, stage: int) -> None:
    case = LAYERS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
        pair = trained(case.make, case.loss, group, stage=stage)
        pair.evaluate(case.loss)


# ---- fast paths of evaluation -------------------------------------------------------------------------------------


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def padded(model: Callable[..., Any], turn: Turn) -> Tensor:
    """The second row has three items, the others four; what is padding does not count."""
    lengths = torch.tensor([4, 3, 4])
    padding = torch.arange(4)[None] >= lengths[:, None]
    torch.manual_seed(turn.generator().initial_seed())
    y = model(rows(turn, 3, 4), src_key_padding_mask=padding)
    return y.masked_fill(padding[..., None], 0.0).square().mean()


def counted(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args)

    return counting


@pytest.mark.ways((2, 3))
def test_transformer_encoder_on_its_fast_path(group: Any, stage: int) -> None:
    """Training, then the fast path of evaluation, with padding (nested tensors) and without.

    The twin's whole layers are fused. PyTorch does so only where modules have no hooks, so ours fuse the attention.
    """
    calls: Counter[str] = Counter()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", message=".*nested tensors")
        for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
            patch.setattr(torch, name, counted(getattr(torch, name), calls))
        pair = Pair(encoder, group, stage=stage)
        for run in (on_sequences, padded):
            pair.step(run)
            assert not calls
            pair.evaluate(run)
            assert calls == {"_transformer_encoder_layer_fwd": 3, "_native_multi_head_attention": 3}
            calls.clear()
        pair.step(padded)


# ---- modules that are never called ----------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Blocks, and outside of them a module whose weights are in containers, recomputed or not. [B, D] -> [B, D]."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.outside = ListsAndDicts()
        self.blocks = net()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is not None:
            return self.blocks(checkpoint(self.outside, x.requires_grad_(), use_reentrant=self.reentrant))
        return self.blocks(self.outside(x))


class Pooled(nn.Module):
    """Blocks, and an attention outside of them, whose last layer is as large as a block. [B, T, D] -> [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = net()
        self.pool = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.pool(x.mean(1, keepdim=True), x, x)[0].squeeze(1)


def on_part(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Call the module alone."""
    return model.module.outside(rows(turn)).square().mean()


READ_FROM_OUTSIDE = {
    "ParameterList": Case(partial(Recomputed, None)),
    "ParameterList-called-alone": Case(partial(Recomputed, None), on_part),
    "ParameterList-nonreentrant": Case(partial(Recomputed, False)),
    "ParameterList-reentrant": Case(partial(Recomputed, True)),
    "MultiheadAttention-out_proj": Case(Pooled, on_sequences),
}


@pytest.mark.parametrize("name", READ_FROM_OUTSIDE)
@pytest.mark.ways((2, 3))
def test_weights_of_modules_that_are_never_called(group: Any, name: str, stage: int) -> None:
    """What is around them reads them: containers of parameters, and the last layer of PyTorch's attention.

    With the units that are found, and with a unit for everything that can be one.
    """
    case = READ_FROM_OUTSIDE[name]
    for units in (None, lambda name, module: True):
        pair = Pair(case.make, group, stage=stage, units=units)
        pair.step(case.loss)
        pair.evaluate(case.loss)
        assert not {"pool.out_proj", "outside.matrices", "outside.vectors"}.intersection(pair.model.unit_names)


# ---- reparametrised weights ---------------------------------------------------------------------------------------


def old_weight_norm() -> nn.Module:
    """The kind that computes an attribute of the module in a pre-hook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def old_spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Symmetric(nn.Module):
    """A parametrisation of the user's, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight.triu() + weight.triu(1).T) * self.gain.exp()


def symmetric() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return parametrizations.spectral_norm(layer)


REPARAMETRISED = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm-old": old_weight_norm,
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm-old": old_spectral_norm,
    "orthogonal-matrix-exp": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="matrix_exp"),
    "orthogonal-householder": lambda: parametrizations.orthogonal(
        nn.Linear(WIDTH, WIDTH), orthogonal_map="householder"
    ),
    "own-parametrisation": symmetric,
}


def twice_cached(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Two forwards that compute each weight once."""
    with parametrize.cached():
        return (model(rows(turn)) * model(rows(turn).flip(0))).mean()


@pytest.mark.parametrize("name", REPARAMETRISED)
@pytest.mark.ways((2, 3))
def test_reparametrised_weights_train_like_the_twins(group: Any, name: str, stage: int) -> None:
    """What a rank's power iterations know is its own."""
    pair = Pair(partial(net, 3, REPARAMETRISED[name]), group, stage=stage)
    for loss in (on_rows, twice_cached):
        pair.step(loss, ("local", "step"), clip=0.01)
    pair.evaluate(on_rows)


# ---- batch norm ---------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.inner(x)))


@pytest.mark.ways((4, 3), (2, 2))
@pytest.mark.parametrize("buffers", ["rank0", "own"])
def test_batch_norm_statistics(group: Any, stage: int, buffers: str) -> None:
    """Statistics are rank 0's when a forward begins, or each rank has those of its own batches."""
    for momentum in (0.1, None):
        pair = trained(partial(net, 3, partial(Normed, momentum)), on_rows, group, stage=stage, buffers=buffers)
        pair.evaluate(on_rows)
        statistics = dict(pair.model.named_buffers())["0.norm.running_mean"]
        gathered = [torch.empty_like(statistics) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, statistics, group=group)
        assert torch.equal(gathered[0], gathered[1]) is (buffers == "rank0")
        same = pair.model.full_state_dict()["0.norm.running_mean"]
        torch.testing.assert_close(same, statistics, rtol=0, atol=0)
