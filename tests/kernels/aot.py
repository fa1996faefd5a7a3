"""Compiles every kernel ahead of time, as it is launched, and prints what became of it: one JSON row per kernel.

A program and not a test: it must run without `TRITON_INTERPRET`. No GPU is needed, the Triton wheel has all the tools.
"""

import json
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path

import torch
import triton
from shardlite_kernels.adamw import _adamw_kernel
from shardlite_kernels.hop import _hop_kernel
from shardlite_kernels.launch import _THREADS, block_size
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = [GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)] + [GPUTarget("hip", "gfx942", 64)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, "i8": torch.int8}
HOPS = [("fp32", "fp32", "fp32"), ("bf16", "bf16", "bf16"), ("bf16", "fp32", "fp32"), ("fp32", "bf16", "fp32")]
HOPS += [("fp64",) * 3, ("i8",) * 3]


def variants():
    """(name, kernel, dtypes of the pointers, constants) of everything that is compiled."""
    for dtypes in HOPS:
        flags = {"NATIVE": dtypes[0] in ("fp64", "i8"), "DIVIDE": dtypes[0] != "i8", "INTERPRET": False}
        yield f"hop {' '.join(dtypes)}", _hop_kernel, dtypes, flags
    for unscale, grad in product((False, True), ("fp32", "bf16")):
        name, flags = f"adamw {grad}{' unscale' * unscale}", {"UNSCALE": unscale, "INTERPRET": False}
        yield name, _adamw_kernel, ("fp32", grad, "fp32", "fp32", "fp32"), flags


def compile_for(target, kernel, dtypes, flags, hinted=True):
    """The kernel for `target`; `hinted` says that `n` is divisible by 16, which Triton sees for itself at a launch."""
    constants = flags | {"BLOCK": block_size(*(torch.empty(0, dtype=DTYPES[dtype]) for dtype in dtypes))}
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    signature = dict.fromkeys(kernel.arg_names, "fp32") | {"n": "i32"} | dict.fromkeys(constants, "constexpr")
    signature |= {name: f"*{dtype}" for name, dtype in zip(pointers, dtypes, strict=True)}
    aligned = [*pointers, "n"] if hinted else pointers
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": _THREADS // target.warp_size, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def row(target, compiled):
    """Bits of each global access, bytes that were spilled, bytes of shared memory, inexact instructions."""
    if target.backend == "cuda":
        return nvidia_row(compiled.asm["cubin"], compiled.asm["ptx"])
    return amd_row(compiled.asm["amdgcn"])


def nvidia_row(cubin, ptx):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    used = {name: int(count) for name, count in re.findall(r"(STACK|SHARED|LOCAL):(\d+)", usage)}
    widths = [
        int((re.findall(r"\.(64|128)\b", access) or ["32"])[0]) for access in re.findall(r"\b(?:LDG|STG)\S*", sass)
    ]
    inexact = re.findall(r"div\.full\S*|\w+\.approx\S*|\S+\.ftz\S*", ptx)
    return {"widths": widths, "spilled": used["STACK"] + used["LOCAL"], "shared": used["SHARED"], "inexact": inexact}


def amd_row(assembly):
    accesses = re.findall(r"\b(?:global|buffer)_(?:load|store)_(\w+)", assembly)
    widths = [{"dwordx2": 64, "dwordx4": 128}.get(access, 32) for access in accesses]
    spilled, private, shared = (
        sum(map(int, re.findall(rf"\.{name}: *(\d+)", assembly)))
        for name in ("vgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size")
    )
    return {"widths": widths, "spilled": spilled + private, "shared": shared, "inexact": []}


def main():
    for target in TARGETS:
        for name, *kernel in variants():
            print(json.dumps({"target": str(target.arch), "kernel": name} | row(target, compile_for(target, *kernel))))
        unhinted = compile_for(target, *next(variants())[1:], hinted=False)
        print(json.dumps({"target": str(target.arch), "kernel": "unhinted"} | row(target, unhinted)))


if __name__ == "__main__":
    main()
