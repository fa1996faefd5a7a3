"""`shardlite.fit`: the cheapest run of a model and its batch that fits.

In: a function that creates the model, an example batch, and a memory. Out: the `Fit` that the search of `fitting.py`
finds.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardlite.config import Precision, launched_ranks
from shardlite.plan.clusters import CLUSTERS, memory_of
from shardlite.plan.fitting import Fit, check_keep, search
from shardlite.plan.limit import MOST_RANKS
from shardlite.plan.planner import Planner, Setting
from shardlite.plan.source import Source


def fit(
    module_factory: Callable[[], nn.Module],
    example_batch: Any,
    memory: str | int,
    *,
    ranks: int | None = None,
    global_batch: int | None = None,
    keep: str | Iterable[str] = (),
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    cluster: str | None = None,
    device: torch.device | str | None = None,
) -> Fit:
    """Find the cheapest run of a model in which a rank holds at most `memory`. Nothing is allocated or trained.

    The search chooses the stage, `reshard_after_forward`, the formats of computation, weights and moments, steps in the
    backward, activation checkpointing, the share of states in host memory, and the micro-batch. Runs that compute the
    same numbers come first, up to the order in which the gradients of micro-batches are added. Among them, the run with
    the shortest predicted step is the cheapest.

    Args:
        module_factory: function that creates the model. It is called with fake tensors.
        example_batch: the arguments of the model for the rows of a rank in a step: a tensor, a tuple, or a mapping of
            keywords. Only shapes and dtypes matter. Tensors whose first dimension is that of the first tensor have rows
            of the batch; others are passed to every micro-batch as they are. The model returns the loss, or an output
            with a `loss`.
        memory: memory of a rank: an amount (`"24GB"`, `"24GiB"`), a card (`"H100"`), or a number of bytes. It includes
            tensors only. Leave some memory for the CUDA context and for fragmentation, see `docs/plan.md`. On a CPU,
            processes of `bench.fit` held up to 44 MB beside their tensors.
        ranks: number of ranks. `None`: as many as the launcher has started, or 1.
        global_batch: rows of all ranks in a step. `None`: the rows of `example_batch`, times the number of ranks.
        keep: what must not change, by name: `"stage"`, `"precision"`, `"moments"`, `"in_backward"`, `"checkpointing"`,
            `"offload"` or `"batch"`.
        precision: the precision to start from. All its options are kept, except that `compute` may become bf16, and
            `master` may become `"split24"`.
        cluster: name of a cluster, such as `"pcie-a100"`, whose predicted times order the runs and are printed. `None`:
            `pcie-a100` or, for ranks on CPUs, `cpu`; times are not printed.
        device: type of the device of the ranks. `None`: that of `cluster`, or else CUDA if it is available.

    Returns:
        The cheapest run. `fit.shardlite` and `fit.adamw` are keyword arguments. `fit.micro_batch`, `fit.accumulate`,
        `fit.sharded` and `fit.checkpointing` say how the program must run a step. `fit.alternatives` has the next two
        runs. `repr(fit)` prints everything.

    Raises:
        LayoutError: no run fits. The message names the smallest run, and what it holds.
        SourceError: the model cannot be created or traced with fake tensors, or the batch has no rows.
        ValueError: an argument has an invalid value.

    Example:
        >>> fit = shardlite.fit(make_model, batch, memory="24GB", ranks=2)
        >>> print(fit)
        >>> model = ShardLite(make_model(), **fit.shardlite)
        >>> optimizer = AdamW(model.parameters(), lr=3e-4, **fit.adamw)
    """
    world_size = launched_ranks() if ranks is None else ranks
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"fit: ranks must be a number from 1 to {MOST_RANKS}, got {ranks!r}")
    if cluster not in (None, *CLUSTERS):
        raise ValueError(f"fit: cluster {cluster!r} is not one of {', '.join(CLUSTERS)}")
    chosen = None if cluster is None else CLUSTERS[cluster]
    nbytes, kept = _nbytes(memory), check_keep(keep)
    kind = None if device is None else torch.device(device).type
    on_gpu = kind != "cpu" if kind is not None else torch.cuda.is_available() if chosen is None else chosen.on_gpu
    source = _source_of(module_factory, example_batch)
    rows = source.rows() if global_batch is None else _rows(global_batch, world_size)
    start = Setting(world_size=world_size, precision=precision, rows=rows, on_gpu=on_gpu)
    with torch.random.fork_rng(devices=[]):  # the constructor may seed
        return search(Planner(source), start, nbytes, keep=kept, cluster=chosen)


def _rows(global_batch: int, ranks: int) -> int:
    """Return the rows of a rank in a step.

    Raises:
        ValueError: the rows cannot be divided equally.
    """
    if not isinstance(global_batch, int) or global_batch < 1 or global_batch % ranks:
        raise ValueError(f"fit: global_batch must be a multiple of the {ranks} ranks, got {global_batch!r}")
    return global_batch // ranks


def _nbytes(memory: str | int) -> int:
    """Return a memory in bytes.

    Raises:
        ValueError: `memory` is neither a positive number of bytes nor a known amount or card.
    """
    if isinstance(memory, str):
        return memory_of(memory, "fit: memory")
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise ValueError(f"fit: memory must be an amount (24GB, 24GiB) or a positive number of bytes, got {memory!r}")
    return memory


def _source_of(make: Callable[[], nn.Module], example: Any) -> Source:
    """Return a model and the shapes of its batch."""
    given = (
        dict(example) if isinstance(example, Mapping) else example if isinstance(example, tuple | list) else (example,)
    )
    leaves, spec = tree_flatten(given)
    shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def batch() -> Any:
        made = (torch.zeros(each[0], dtype=each[1]) if isinstance(each, tuple) else each for each in shapes)
        return tree_unflatten(list(made), spec)

    sizes = " and ".join(f"{list(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor))
    return Source(getattr(make, "__name__", type(make).__name__), make, batch, f"batch of {sizes}")
