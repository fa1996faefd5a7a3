"""Corners of autograd and of `nn.Module` that a sharded model must get through, or refuse.

Every rank computes the same here, so the mean of the gradients is the gradient of one plain copy, to the bit.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from shardlite import ShardLite
from tests.residual import WIDTH, Block, batch, net, square
from tests.sharded import assert_gradients_equal, compare


class TakesSlope(nn.Module):
    """Uses a function transform inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: self.inner(z).sum())(x)


def transform_body(group):
    compare(nn.Sequential(TakesSlope(), TakesSlope()), square, group, stage=0)
    model = ShardLite(nn.Sequential(TakesSlope(), TakesSlope()), group=group)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        square(model)


def test_function_transforms_work_at_stage_0_and_are_refused_by_torch_at_stage_3(cluster):
    cluster.check(transform_body, 2)


class Batched(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(lambda row: torch.tanh(self.inner(row)))(x)


def vmap_body(group):
    compare(nn.Sequential(*(Batched() for _ in range(3))), square, group)


def test_vmap_inside_a_forward(cluster):
    cluster.check(vmap_body, 2)


class SparseInput(nn.Module):
    """Saves a sparse tensor for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        adjacency = torch.eye(3).to_sparse()
        return torch.sparse.mm(adjacency, x) @ self.weight


def sparse_body(group):
    compare(nn.Sequential(SparseInput(), SparseInput()), square, group)


def test_saved_sparse_tensors_pass_through(cluster):
    cluster.check(sparse_body, 2)


def sparse_gradient_body(group):
    model = nn.Sequential(nn.Embedding(40, WIDTH, sparse=True), Block(), Block())
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    wrapped = ShardLite(model, group=group)
    tokens = torch.tensor([3, 7, 3])
    wrapped(tokens).square().mean().backward()
    dense(tokens).square().mean().backward()
    assert_gradients_equal(wrapped, dense)


def test_sparse_gradients_are_made_dense(cluster):
    cluster.check(sparse_gradient_body, 2)


def inference_body(group):
    """Buffers that were gathered for inference serve training afterwards."""
    plain = net()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    with torch.inference_mode():
        torch.testing.assert_close(model(batch()), twin(batch()), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(batch()), twin(batch()), rtol=0, atol=0)
    square(model).backward()
    square(twin).backward()
    assert_gradients_equal(model, twin)


def test_inference_then_training(cluster):
    cluster.check(inference_body, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def recurrent_body(group):
    model = nn.Sequential(Recurrent(), Recurrent())
    compare(model, lambda m: m(batch()[None]).square().mean(), group)


def test_lstm(cluster):
    cluster.check(recurrent_body, 2)


def reparametrised_body(group):
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )
    compare(model, square, group)
    normed = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    )
    compare(normed, square, group)


def test_reparametrised_weights(cluster):
    cluster.check(reparametrised_body, 2)


def fast_path_body(group):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model, twin = compare(encoder, lambda m: m(batch()[None]).square().mean(), group)
    model.eval(), twin.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch()[None]), twin(batch()[None]), rtol=0, atol=0)


def test_transformer_encoder_in_training_and_on_its_fast_path(cluster):
    cluster.check(fast_path_body, 2)


def buffers_body(group):
    """Running statistics are the module's own, and rank 0's at the start."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        model[1].running_mean += torch.distributed.get_rank(group)
    wrapped = ShardLite(model, group=group)
    start = wrapped.full_state_dict()["1.running_mean"]
    square(wrapped).backward()
    return start.sum().item(), dict(wrapped.named_buffers())["1.running_mean"].ne(0).any().item()


def test_buffers_come_from_rank_0_and_are_updated_in_place(cluster):
    assert cluster.run(buffers_body, 2) == [(0.0, True)] * 2


def gradients_by_hand_body(group):
    model = ShardLite(net(), group=group)
    with pytest.raises(RuntimeError, match=r"not have been used|unused|not require"):
        torch.autograd.grad(square(model), list(model.parameters()))


def test_shards_are_not_in_the_graph(cluster):
    cluster.check(gradients_by_hand_body, 2)


def interrupted_body(group):
    """A forward that raises, on every rank alike, leaves the model usable; so does an interrupt."""

    class Fails(Block):
        error: BaseException | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.error is not None:
                raise self.error
            return super().forward(x)

    plain = nn.Sequential(Block(), Fails(), Block())
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    for error in (ValueError("on purpose"), KeyboardInterrupt()):
        plain[1].error = error
        with pytest.raises(type(error)):
            square(model)
    plain[1].error = None
    square(model).backward()
    square(twin).backward()
    assert_gradients_equal(model, twin)
    return [unit.holds for unit in model._units]


def test_a_forward_that_raises_leaves_the_model_usable(cluster):
    for users in cluster.run(interrupted_body, 2):
        assert set(users) == {0}


def compiled_body(group):
    """The whole model compiled: each unit breaks the graph, and a retained graph can be walked twice."""
    warnings.filterwarnings("ignore", r"The \.grad attribute")  # the compiler looks at it when it meets module hooks
    plain = net()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    compiled = torch.compile(model, backend="aot_eager")
    ours, theirs = square(compiled), square(twin)
    for _ in range(2):
        ours.backward(retain_graph=True)
        theirs.backward(retain_graph=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert_gradients_equal(model, twin)


def test_compiling_the_whole_model(cluster):
    cluster.check(compiled_body, 2)
