"""The cases that `bench.kernels.aot` compiles: each kernel as it is launched, for each state format and dtype.

A case describes the reads and writes of each tensor. The bytes of side tables are computed from this description. The
bytes of element tensors are counted in the machine code. The sum of both must be `bytes`, which is the formula in the
docstring of the kernel's module.

Element tensors have `S` elements. In a side table, a group of elements shares an entry, or the table has a size that
does not depend on `S`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from shardlite_kernels.adamw import _adamw_kernel, block_of
from shardlite_kernels.cast import _cast_kernel
from shardlite_kernels.device_ring import _ring_reduce_scatter_kernel
from shardlite_kernels.hop import _hop_kernel
from shardlite_kernels.launch import block_size, tl
from shardlite_kernels.quantize import _dequantize_kernel, _quantize_kernel
from shardlite_kernels.rows import _add_rows_kernel
from shardlite_kernels.scale import _scale_kernel
from shardlite_kernels.signals import DEPTH
from shardlite_kernels.split import _join_kernel, _split_kernel
from shardlite_kernels.state import State
from shardlite_kernels.stats import _stats_kernel, stats_block

from bench.kernels.machine_code import Launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
DTYPES |= {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}


class Use(NamedTuple):
    """Reads and writes of one tensor by a kernel."""

    dtype: str
    moved: str
    """A letter for each time that an entry is read or written."""

    share: int = 1
    """Number of elements that share an entry, or 0 for a table whose size does not depend on `S`."""

    @property
    def bytes(self) -> float:
        """Bytes that are moved per element."""
        return DTYPES[self.dtype].itemsize * len(self.moved) / self.share if self.share else 0.0


class Case(NamedTuple):
    """A kernel as it is launched for tensors of these dtypes."""

    kernel: str
    format: str
    code: Any
    uses: Mapping[str, Use]
    bytes: float
    """Bytes per element by the formula in the docstring of the kernel's module."""

    block: int
    flags: Mapping[str, Any] = {}
    gradient: str = ""
    exact: bool = True
    """Whether every instruction must be exact."""

    @property
    def line(self) -> str:
        """Name of the case's line in the table."""
        return f"{self.kernel}: {self.format}"

    @property
    def launch(self) -> Launch:
        """Arguments of the compilation by Triton."""
        pointers = {name: use.dtype for name, use in self.uses.items()}
        constants = {**self.flags, "BLOCK": self.block}
        known = {name: value for name, value in constants.items() if name in self.code.arg_names}
        return Launch(self.code, pointers, known)

    @property
    def elements(self) -> dict[str, Use]:
        """The element tensors [S]."""
        return {name: use for name, use in self.uses.items() if use.share == 1}


WEIGHTS = {"fp32": {"param": Use("fp32", "rw")}, "split24": {"param": Use("bf16", "rw"), "low": Use("i8", "rw")}}
MOMENTS = {
    "fp32": {"exp_avg": Use("fp32", "rw"), "exp_avg_sq": Use("fp32", "rw")},
    "bf16": {"exp_avg": Use("bf16", "rw"), "exp_avg_sq": Use("bf16", "rw")},
    "int8": {
        **{"exp_avg": Use("i8", "rw"), "exp_avg_sq": Use("u8", "rw")},
        **{"avg_exponent": Use("u8", "rw", 32), "sq_exponent": Use("u8", "rw", 32)},
    },
}
WEIGHT_BYTES = {"fp32": 4, "split24": 3}
MOMENT_BYTES = {"fp32": 8, "bf16": 4, "int8": 2.0625}
ROW_BYTES = 1 / 16
"""Bytes per element of the table of rows: 2 bytes for 32 elements."""

TABLES = {"rows": Use("i16", "r", 32), "scalars": Use("fp32", "r", 0), "keys": Use("i32", "r", 0)}


def cases() -> list[Case]:
    """Return all cases to compile."""
    return [*adamws(), *splits(), *hops(), *sums(), *statistics(), *casts(), *codes(), *rings()]


ROWS = 8
"""Number of ranks whose parts of a segment are added in one call."""

IN_A_BUCKET = ", in a bucket"
"""The case in which rows were exchanged inside a bucket. One row, or a part of a row, is staged."""


def adamws() -> Iterator[Case]:
    """Yield AdamW for gradients and for sums, in six formats and two dtypes of gradients. bf16 also stands for fp16."""
    moved = {
        "adamw": {"grad": "r"},
        "adamw unscale": {"grad": "rw"},
        "reduce_adamw": {"grad": "r", "received": "r"},
        "add_rows_adamw": {"received": "r" * ROWS},
        f"add_rows_adamw{IN_A_BUCKET}": {"received": "r" * (ROWS - 1), "received or staged": "r"},
    }
    for kernel, weight, moment, gradient in product(moved, WEIGHTS, MOMENTS, ("fp32", "bf16")):
        unscale = kernel == "adamw unscale"
        grads = {name: Use(gradient, each) for name, each in moved[kernel].items()}
        if IN_A_BUCKET in kernel:
            grads["staged"] = Use(gradient, "", 0)
        if "received" in grads:
            grads["bad"] = Use("i32", "w", 0)
        uses = {**WEIGHTS[weight], **MOMENTS[moment], **grads, **TABLES}
        like = {name: torch.empty(0, dtype=DTYPES[use.dtype]) for name, use in uses.items()}
        state = State(like["param"], like["exp_avg"], like["exp_avg_sq"])
        s, g = WEIGHT_BYTES[weight] + MOMENT_BYTES[moment], DTYPES[gradient].itemsize
        yield Case(
            kernel=kernel.removesuffix(IN_A_BUCKET),
            format=f"{weight} weights, {moment} moments{IN_A_BUCKET if 'staged' in uses else ''}",
            gradient=gradient,
            code=_adamw_kernel,
            uses=uses,
            bytes=2 * s + len("".join(moved[kernel].values())) * g + ROW_BYTES,
            block=block_of(state, like.get("grad"), like.get("received"), unscale=unscale),
            flags={
                **{"UNSCALE": unscale, "UNROLL": ROWS if "add_rows" in kernel else 0},
                "STAGED": int("staged" in uses),
            },
            exact=moment != "int8",
        )


def splits() -> Iterator[Case]:
    """Yield the cases that split and join weights."""
    parts = ("high", "bf16"), ("low", "i8")
    block = _block("fp32")
    to = {"source": Use("fp32", "r"), **{name: Use(dtype, "w") for name, dtype in parts}}
    back = {"out": Use("fp32", "w"), **{name: Use(dtype, "r") for name, dtype in parts}}
    yield Case("split", "fp32 to bf16 and 8 bits", _split_kernel, to, 7, block)
    yield Case("join", "bf16 and 8 bits to fp32", _join_kernel, back, 7, block)


def hops() -> Iterator[Case]:
    """Yield the cases of one hop of a ring reduction, which adds two ranks' parts of a segment."""
    for out, received, own in [
        *(("fp32", "fp32", "fp32"), ("bf16", "bf16", "bf16"), ("bf16", "fp32", "fp32"), ("fp32", "bf16", "fp32")),
        *(("fp32", "bf16", "bf16"), ("fp64", "fp64", "fp64"), ("i8", "i8", "i8")),
    ]:
        uses = {"out": Use(out, "w"), "received": Use(received, "r"), "own": Use(own, "r")}
        flags = {"NATIVE": out in ("fp64", "i8"), "DIVIDE": out != "i8", "STATS": False}
        bytes_: float = sum(DTYPES[dtype].itemsize for dtype in (out, received, own))
        block = _block(out, received, own)
        yield Case("hop", f"{received} + {own} to {out}", _hop_kernel, uses, bytes_, block, flags, exact=out != "fp64")
        if received == own and out != "i8":
            wide = "fp64" if out == "fp64" else "fp32"
            block = stats_block(torch.empty(0, device="meta"))
            uses = {**uses, "stats": Use(wide, "ww", block)}
            bytes_ += 2 * DTYPES[wide].itemsize / block
            yield Case(
                kernel="hop, statistics",
                format=f"{received} + {own} to {out}",
                code=_hop_kernel,
                uses=uses,
                bytes=bytes_,
                block=block,
                flags={**flags, "STATS": True},
                exact=out != "fp64",
            )


def sums() -> Iterator[Case]:
    """Yield the cases that run all hops of a reduction in one kernel."""
    pairs = ("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp64", "fp64"), ("i8", "i8")
    orders = {"": pairs, ", a tree": pairs[:3], IN_A_BUCKET: pairs[:3]}
    for order, (wire, out) in [(order, pair) for order, some in orders.items() for pair in some]:
        tree, staged = order == ", a tree", int(order == IN_A_BUCKET)
        block, native = stats_block(torch.empty(0, device="meta")), out in ("fp64", "i8")
        w, o = DTYPES[wire].itemsize, DTYPES[out].itemsize
        uses = {"out": Use(out, "w"), "rows": Use(wire, "r" * (ROWS - staged))}
        if staged:
            uses |= {"rows or staged": Use(wire, "r"), "staged": Use(wire, "", 0)}
        flags = {"UNROLL": ROWS, "NATIVE": native, "DIVIDE": out != "i8", "STATS": out != "i8"}
        flags["STAGED"] = -1 if tree else staged
        bytes_: float = ROWS * w + o
        if out == "i8":
            block = _block(out, wire)
        else:
            wide = "fp64" if out == "fp64" else "fp32"
            uses["stats"] = Use(wide, "ww", block)
            bytes_ += 2 * DTYPES[wide].itemsize / block
        line = f"{ROWS} rows of {wire} to {out}{order}"
        yield Case("add_rows", line, _add_rows_kernel, uses, bytes_, block, flags, exact=out != "fp64")


def statistics() -> Iterator[Case]:
    """Yield the cases that compute only statistics, and those that multiply by a factor."""
    for dtype in ("fp32", "bf16", "fp64"):
        wide, size, flags = "fp64" if dtype == "fp64" else "fp32", DTYPES[dtype].itemsize, {"NATIVE": dtype == "fp64"}
        block = stats_block(torch.empty(0, device="meta"))
        uses = {"x": Use(dtype, "r"), "stats": Use(wide, "ww", block)}
        yield Case("stats", dtype, _stats_kernel, uses, size + 2 * DTYPES[wide].itemsize / block, block, flags)
        uses, flags = {"x": Use(dtype, "rw"), "factor": Use("fp32", "r", 0)}, {**flags, "RUNS": 0, "ALIGNED": False}
        yield Case("scale", dtype, _scale_kernel, uses, 2 * size, _block(dtype), flags)
        uses, flags = {**uses, "table": Use("i64", "r", 0)}, {**flags, "RUNS": 64, "ALIGNED": True}
        yield Case("scale_all", dtype, _scale_kernel, uses, 2 * size, _block(dtype), flags)


def casts() -> Iterator[Case]:
    """Yield the cases that cast between dtypes."""
    for out, source in (("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16"), ("bf16", "fp64"), ("fp64", "fp32")):
        uses = {"out": Use(out, "w"), "source": Use(source, "r")}
        flags = {"WIDE": source == "fp64", "TWICE": (out, source) == ("bf16", "fp64")}
        bytes_ = DTYPES[out].itemsize + DTYPES[source].itemsize
        yield Case("cast", f"{source} to {out}", _cast_kernel, uses, bytes_, _block(out, source), flags)


def codes() -> Iterator[Case]:
    """Yield the cases that convert to and from 8-bit codes with an exponent per 32 elements."""
    for dtype in ("fp32", "bf16"):
        bytes_, block = DTYPES[dtype].itemsize + 1 + 1 / 32, _block(dtype)
        uses = {"codes": Use("i8", "w"), "scales": Use("u8", "w", 32), "source": Use(dtype, "r")}
        yield Case("quantize", f"{dtype} to 8 bits", _quantize_kernel, uses, bytes_, block)
        uses = {"out": Use(dtype, "w"), "codes": Use("i8", "r"), "scales": Use("u8", "r", 32)}
        yield Case("dequantize", f"8 bits to {dtype}", _dequantize_kernel, uses, bytes_, block)


RING = {"slot_table": Use("i64", "r", 0), "flag_table": Use("i64", "r", 0), "flags": Use("i64", "r", 0)}
RING |= {"error": Use("i64", "r", 0)}
"""Side tables of the ring kernels: signals between neighbours, and addresses of the neighbours."""


def rings() -> Iterator[Case]:
    """Yield collectives that run in one kernel. `bytes` counts all code of a step, even code that is skipped."""
    for full, wire, out in (
        *(("fp32", "fp32", "fp32"), ("bf16", "fp32", "fp32"), ("bf16", "fp32", "bf16"), ("bf16", "bf16", "bf16")),
    ):
        g, w, o = (DTYPES[dtype].itemsize for dtype in (full, wire, out))
        yield Case(
            kernel="ring reduce-scatter",
            format=f"{full} by {wire} to {out}",
            code=_ring_reduce_scatter_kernel,
            uses={**RING, "full": Use(full, "r"), "slots": Use(wire, "rw"), "out": Use(out, "w")},
            bytes=g + 2 * w + o,
            block=_block(full, wire, out),
            flags=_ring_flags(wire),
        )
    for weight, moment in product(WEIGHTS, MOMENTS):
        own = {"full": Use("bf16", "r"), "slots": Use("fp32", "rw"), "bad": Use("i32", "w", 0)}
        uses = {**RING, **own, **WEIGHTS[weight], **MOMENTS[moment], **TABLES}
        yield Case(
            kernel="ring reduce-adamw",
            format=f"{weight} weights, {moment} moments",
            code=_ring_reduce_scatter_kernel,
            uses=uses,
            bytes=2 + 2 * 4 + 2 * (WEIGHT_BYTES[weight] + MOMENT_BYTES[moment]) + ROW_BYTES,
            block=_block("fp32"),
            flags=_ring_flags("fp32"),
            exact=moment != "int8",
        )


def _ring_flags(wire: str) -> dict[str, Any]:
    dtypes = {"fp32": tl.float32, "bf16": tl.bfloat16}
    return {"WIRE": dtypes[wire], "DEPTH": DEPTH, "AMD": False}


def _block(*dtypes: str) -> int:
    return block_size(*(torch.empty(0, dtype=DTYPES[dtype]) for dtype in dtypes))
