"""What can be set: precision, the route of messages, and environment variables, which are read nowhere else."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast, get_args

import torch

Algorithm = Literal["ring", "bidirectional", "direct", "hierarchical"]
"""Schedules of collectives."""

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

COMPUTE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes that forward and backward may run in."""

WIRE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that gradients may be summed in, where the weights that they are for are not in fp64."""

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights for which gathers can send 8-bit codes."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype is used where. Floating-point parameters only; others stay what they are.

    A trainable parameter is kept by the optimizer in at least fp32, whatever it was wrapped in: updates are too small
    for fewer bits. A frozen one is kept as it was.
    """

    compute: torch.dtype | None = None
    """Of gathered weights, and so of forward and backward; inputs are cast to it. `None`: each parameter's own."""

    reduce: torch.dtype = torch.float32
    """Of gradients while they are accumulated and summed over the ranks. In bf16 each hop of the ring rounds, which
    loses about `sqrt(W)` units in the last place of bf16 at `W` ranks. (One rank that casts no weights sums nothing,
    and rounds nothing.)"""

    master: torch.dtype | Literal["split24"] = torch.float32
    """Of the weights that the optimizer steps. fp64 parameters stay fp64. `"split24"` keeps the upper 24 bits of fp32
    numbers in two parts, as bf16, which is what is gathered, and 8 bits more: 3 bytes per element, and no copy in the
    dtype of the computation. It goes with `compute=torch.bfloat16` and with `shardlite.AdamW` only."""

    output: torch.dtype | None = None
    """To which floating-point outputs of the model are cast. `None`: they are left alone."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: a dtype cannot do what it is meant for.
        """
        for name, dtype, allowed in (
            ("compute", self.compute, (None, *COMPUTE)),
            ("reduce", self.reduce, WIRE),
            ("master", self.master, (torch.float32, "split24")),
            ("output", self.output, (None, *COMPUTE)),
        ):
            if dtype not in allowed:
                choices = ", ".join(str(choice) for choice in allowed)
                raise ValueError(f"Precision: {name} must be one of {choices}; got {dtype!r}")
        if self.master == "split24" and self.compute != torch.bfloat16:
            raise ValueError(
                'Precision: master="split24" keeps weights as bf16 and 8 bits more, so it goes with '
                f"compute=torch.bfloat16; got compute={self.compute}"
            )

    def master_of(self, dtype: torch.dtype, *, trainable: bool) -> torch.dtype:
        """Return in which dtype a parameter of `dtype` is stepped; if it is not split, it is kept so."""
        if not (trainable and dtype.is_floating_point):
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def splits(self, master: torch.dtype, *, trainable: bool) -> bool:
        """Return whether a parameter that is stepped in `master` is kept in two parts."""
        return self.master == "split24" and trainable and master == torch.float32

    def compute_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return in which dtype a parameter of `dtype` is gathered."""
        return self.compute if self.compute is not None and dtype in COMPUTE else dtype

    def reduce_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return in which dtype the gradients of weights kept in `dtype` are summed: those of fp64 ones in fp64."""
        return torch.float64 if dtype == torch.float64 else self.reduce


TransportName = Literal["auto", "shared_memory", "symmetric_memory", "p2p"]
AlgorithmName = Literal["auto"] | Algorithm


@dataclass(frozen=True, kw_only=True)
class Route:
    """How messages get from rank to rank."""

    transport: TransportName = "auto"
    """`"shared_memory"`: CPU tensors between processes of one host stay in memory that these share.
    `"symmetric_memory"`: CUDA tensors go through memory that the GPUs of one host can all read (PyTorch's symmetric
    memory; 64 MiB per rank and connection). `"p2p"`: messages of the process group (NCCL, gloo; CUDA tensors over
    gloo go through pinned memory). `"auto"`: shared memory where it can be had, else messages. It never chooses
    symmetric memory: no GPU has run that yet, so nothing says whether it is faster than NCCL."""

    algorithm: AlgorithmName = "auto"
    """The schedule of gathers and reductions, see `docs/rings.md`. `"auto"` takes `"ring"` or `"direct"`, which add in
    the same order; the others give other last bits."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: there is no such transport or algorithm.
        """
        for name, value, names in (
            ("transport", self.transport, get_args(TransportName)),
            ("algorithm", self.algorithm, ("auto", *ALGORITHMS)),
        ):
            if value not in names:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}; got {value!r}")


def transport_or_default(name: TransportName) -> TransportName:
    """Return `name` or, if that is `"auto"`, what the environment says (`SHARDLITE_TRANSPORT`), if it says anything.

    Raises:
        ValueError: it is not the name of a transport.
    """
    named = os.environ.get("SHARDLITE_TRANSPORT", "auto") if name == "auto" else name
    return Route(transport=cast(TransportName, named)).transport


def check_timeout(timeout: timedelta) -> None:
    """Check that a timeout is a time.

    Raises:
        TypeError: it is no `timedelta`.
        ValueError: it is not above zero.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be above zero, got {timeout}: it is how long a rank waits for another one")


def devices_may_overlap() -> bool:
    """Tell whether ranks may have symmetric memory on one GPU (`TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`)."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0") == "1"


def poison_evicted_buffers() -> bool:
    """Tell whether buffers are to be filled with NaN when their unit is evicted (`SHARDLITE_POISON=1`).

    Code that still looks at one then computes NaN at once, instead of something plausible. The tests run this way
    throughout.
    """
    return os.environ.get("SHARDLITE_POISON", "0") not in ("", "0")
