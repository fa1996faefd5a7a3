"""`torch.compile` of a sharded model, by blocks and as a whole, has the bits of a plain twin without compilation.

The graph breaks where a unit begins and where it ends, since the gather must happen between.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from shardlite import ShardLite
from tests.support.models.small import VOCABULARY, LanguageModel
from tests.support.twins.sharded import Pair, Turn, most_buffers, slow, take_step

Model = Callable[..., Any]
Graph = Callable[..., Any]


def on_tokens(model: Model, turn: Turn) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=turn.generator())
    return model(tokens).square().mean()


@contextmanager
def recorded_graphs(backend: str) -> Iterator[tuple[Graph, list[fx.GraphModule]]]:
    """Yield a backend that notes every graph that it compiles, and the graphs."""
    graphs: list[fx.GraphModule] = []
    compile_graph = torch._dynamo.lookup_backend(backend)

    def noting(graph: fx.GraphModule, inputs: list[Any]) -> Graph:
        graphs.append(graph)
        return compile_graph(graph, inputs)

    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        warnings.filterwarnings("ignore", message="`torch.jit")
        yield noting, graphs
    torch.compiler.reset()


def products(graph: fx.GraphModule) -> int:
    """Return how many linear layers a graph has."""
    return sum(node.op == "call_function" and node.target is torch._C._nn.linear for node in graph.graph.nodes)


def compiles(group: Any, whole: bool, backend: str, reentrant: bool | None, stage: int) -> tuple[list[int], int]:
    """Body of a rank: compile every block, or the model in the wrapper; after one step nothing is compiled anew.

    Returns:
        How many linear layers there are in each graph that has some; how many buffers of a block there were at once.
    """
    with recorded_graphs(backend) as (noting, graphs):
        options = {"prefetch": 0} if stage == 3 else {}
        pair = Pair(lambda: LanguageModel(blocks=2, reentrant=reentrant), group, stage=stage, **options)
        inner = pair.model.module
        for part in [inner] if whole else inner.blocks:
            part.compile(backend=noting)
        pair.step(on_tokens)
        pair.model.ledger.reset_peak()
        with torch.compiler.set_stance("fail_on_recompile"):
            pair.step(on_tokens)
            buffers = most_buffers(pair.model) if stage == 3 else 1
            pair.step(on_tokens, ("local", "step"), clip=0.01)
        return [count for graph in graphs if (count := products(graph))], buffers


CASES = [("aot_eager", 2, 3), ("aot_eager", 2, 2), ("eager", 2, 3), ("aot_eager", 4, 3)]


def few(*fast: tuple[str, int, int]) -> pytest.MarkDecorator:
    """Compiling takes seconds, so not all cases are fast ones."""
    cases = [case if case in fast else slow(*case) for case in CASES]
    return pytest.mark.parametrize(("backend", "world_size", "stage"), cases)


@few(("aot_eager", 2, 3))
def test_compiled_blocks(cluster, backend, world_size, stage):
    """Both blocks share a graph with all four linear layers of a block, and one buffer is enough for both."""
    for graphs, buffers in cluster.run(compiles, world_size, False, backend, None, stage):
        assert graphs == [4]
        assert buffers == 1


@few()
def test_the_compiled_inner_model_breaks_its_graph_at_units(cluster, backend, world_size, stage):
    """One graph for the blocks, and one with the head, which belongs to the root."""
    for graphs, buffers in cluster.run(compiles, world_size, True, backend, None, stage):
        assert graphs == [4, 1]
        assert buffers == 1


@pytest.mark.parametrize(("reentrant", "world_size", "stage"), [slow(True, 2, 3), slow(False, 4, 3), slow(False, 2, 2)])
def test_compiled_blocks_under_activation_checkpointing(cluster, reentrant, world_size, stage):
    """Reentrant checkpointing runs each block with gradients and without, in a graph for either."""
    for graphs, _ in cluster.run(compiles, world_size, False, "aot_eager", reentrant, stage):
        assert graphs == [4] * (2 if reentrant else 1)


# ---- equal blocks ---------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fall(torch.tanh(self.rise(x)))


class Block(nn.Module):
    """Has modules with parameters inside modules with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def graphs_of(group: Any, stage: int | None, how: str, dynamic: bool) -> int:
    """Train twelve equal blocks, each compiled by itself, and return how many graphs that took. No stage: DDP."""
    torch.manual_seed(0)
    with recorded_graphs("eager") as (noting, graphs):
        blocks = [Block() for _ in range(12)]
        net = nn.Sequential(*blocks)
        if how == "before":
            for block in blocks:
                block.compile(backend=noting, dynamic=dynamic)
        elif how == "by function":
            net = nn.Sequential(*(torch.compile(block, backend=noting, dynamic=dynamic) for block in blocks))
        options = {"process_group": group} if stage is None else {"group": group, "stage": stage}
        model: Any = (DistributedDataParallel if stage is None else ShardLite)(net, **options)
        if how == "after":
            for block in blocks:
                block.compile(backend=noting, dynamic=dynamic)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(samples: int) -> None:
            take_step(optimizer, model(torch.ones(samples, 8)).square().mean())

        for samples in (3, 4, 5, 6) if dynamic else (3, 3, 3):
            step(samples)
        with torch.compiler.set_stance("fail_on_recompile"):
            step(7 if dynamic else 3)
        return len(graphs)


FAST = [(3, "after", True), (2, "after", False), (3, "by function", False)]


@pytest.mark.parametrize(
    ("stage", "how", "dynamic"),
    [
        case if case in FAST else slow(*case)
        for case in product(range(4), ("after", "before", "by function"), (True, False))
    ],
)
def test_equal_blocks_take_as_many_graphs_as_under_ddp(group: Any, stage: int, how: str, dynamic: bool) -> None:
    """Dynamo guards on the keys of hooks: if those differed from block to block, each would be compiled again."""
    theirs = graphs_of(group, None, how, dynamic)
    ours = graphs_of(group, stage, how, dynamic)
    assert 0 < ours <= theirs <= 2, (ours, theirs)
