"""Count the work of the host per block on the code path of a GPU, and time launches of kernels, without a GPU.

    python -m bench.host --gpu-path

trains blocks of GPT-2 (12 parameters, checkpointed) and of Llama (9, not checkpointed) in bf16, as rank 0 of 8. Streams
and events are simulated (`shardlite.lab.fake.simulated_cuda`); collectives and launches of Triton do nothing. All other
code runs as on a GPU: queues, kept buffers, hooks, and the checks of kernels. Counts are exact. They are the difference
between a steady step of 6 blocks and one of 4, divided by 2, so they exclude the work of the root and of the step as a
whole.

| key | count per block and step |
|---|---|
| `triton KERNEL` | launches of a Triton kernel |
| `launches` | other operators that launch a kernel or a copy, including the model's |
| `views` | operators that return a view |
| `collective KIND` | collectives |
| `events created`, `events recorded`, `events waited for` | events; a stream that waits for a stream does all three |
| `stream contexts`, `device contexts`, `current stream` | entered contexts, and reads of the current stream |
| `set_data` | assignments of memory to a parameter of ShardLite |
| `packed`, `unpacked` | tensors that ShardLite's saved-tensor hooks get |
| `gradient hooks` | calls of ShardLite's hook of a parameter |
| `inner hooks` | calls of the hooks of modules inside a block |
| `own calls` | Python functions of ShardLite that are entered; of `torch.distributed` for FSDP2 |
| `all calls` | Python functions that are entered, except those of the simulation |

NCCL's own events, Python inside a launch of Triton, and PyTorch's code for GPUs are not counted. `us` is the CPU time
of a launch with the arguments of a step. Triton gets a driver that launches nothing, so the time excludes that of the
launcher in C (2 to 4 us) and of the real driver.

Legend: `W` ranks.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import memset
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from time import process_time
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import shardlite_kernels
import torch
import torch.distributed as dist
from shardlite_kernels import is_here
from shardlite_kernels.launch import launch, use_triton
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import shardlite
from bench.gpu.fake_ranks import RANKS, SYSTEMS
from shardlite.comm import context
from shardlite.comm.control.failure_reports import FailureReports
from shardlite.comm.traffic import Traffic
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.group_collectives import GroupCollectives
from shardlite.comm.transport.staging import SLICE_NBYTES
from shardlite.config import Route
from shardlite.engine import backward
from shardlite.lab.compared.systems import Build
from shardlite.lab.compared.workloads import LLAMA_BLOCK_NUMEL, Workload, llama_blocks, transformers_gpt2
from shardlite.lab.fake.fake_group import __file__ as fake_group_file
from shardlite.lab.fake.fake_group import as_one_rank, connect_as_over_nccl, fake_group, operators, replaced
from shardlite.lab.fake.simulated_cuda import Cuda
from shardlite.lab.memory.machine import machine
from shardlite.lab.table import Row, markdown_table, where
from shardlite.lab.table import render as render_rows
from shardlite.lab.timer import quantiles
from shardlite.params import parameters
from shardlite.weights.saved_tensors import SavedTensorHooks

_FEW, _MANY = 4, 6  # blocks
_WARM_UP = 3  # steps before the one that is counted
_BATCH, _ROUNDS = 200, 9  # launches that are timed together, and how often
_CLIP = 1.0

_KINDS = {"gather": "all-gather", "scatter": "reduce-scatter", "alltoall": "all-to-all"}
_NAMED: Mapping[CodeType, str] = {
    SavedTensorHooks.pack.__code__: "packed",
    SavedTensorHooks.unpack.__code__: "unpacked",
    backward._deliver.__code__: "gradient hooks",
}
_SIMULATION = tuple(str(Path(each).parent) for each in (__file__, fake_group_file))
_TABLE = torch.zeros(3, 64, dtype=torch.int64)
_SHARDLITE = tuple(str(Path(each.__file__).parent) for each in (shardlite, shardlite_kernels))
_OWN = {"floor": (), "fsdp2": (str(Path(dist.__file__).parent),)}
"""Folders of the files of a system, if it is not ShardLite."""

_COMMON = {"bench", "words", "block", "system", "ranks", "transformers", *machine()}
"""Keys of a row that are not counts."""

# ---- what is trained ------------------------------------------------------------------------------------------------


def _gpt2(layers: int) -> Workload:
    return transformers_gpt2("gpt2", layers=layers, width=64, vocabulary=64, context=8, batch=1)


def _llama(layers: int) -> Workload:
    """Return blocks that have 14 slices of reductions, like real blocks. Narrower blocks would have fewer slices."""
    return llama_blocks("llama", layers=layers, context=8, width=128)


BLOCKS: Mapping[str, Callable[[int], Workload]] = {"gpt2": _gpt2, "llama": _llama}
"""Functions of the number of blocks."""

SLICES = {"gpt2": SLICE_NBYTES, "llama": SLICE_NBYTES * 213_248 // LLAMA_BLOCK_NUMEL}
"""Maximum bytes of a slice, in proportion to the block."""


BUILDS: Mapping[str, Build] = {name: SYSTEMS[name] for name in ("floor", "fsdp2", "exact", "fast", "in_backward")}

Launch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of `launch`."""

# ---- counts ---------------------------------------------------------------------------------------------------------


class Counts:
    """What the host has done."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.counts = self.cuda.calls
        self.launched: dict[str, Launch] = {}
        """The arguments of `launch` for each kernel."""

    def launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        """Count a launch instead of making it."""
        name = kernel.fn.__name__.strip("_").removesuffix("_kernel")
        self.counts[f"triton {name}"] += 1
        if name not in self.launched:
            self.launched[name] = tree_map_only(Tensor, _like, (kernel, *arguments)), options

    def exchange(self, method: str, *_: Any) -> None:
        """Count a collective instead of making it."""
        self.counts[f"collective {next(kind for part, kind in _KINDS.items() if part in method)}"] += 1

    def set_data(self, param: Tensor, memory: Tensor) -> None:
        """Count an assignment of memory to a parameter, and make it."""
        self.counts["set_data"] += 1
        torch._C.TensorBase.data.__set__(param, memory)

    def count_hooks(self, units: Sequence[nn.Module]) -> None:
        """From now on, count calls of the hooks of modules inside the units."""

        def counted(hook: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            self.counts["inner hooks"] += 1
            return hook(*arguments, **options)

        for module in (inner for unit in units for inner in unit.modules() if inner is not unit):
            for table in (module._forward_pre_hooks, module._forward_hooks):
                table.update({key: partial(counted, hook) for key, hook in table.items()})

    def profile(self, step: Callable[[], object], own: tuple[str, ...]) -> None:
        """Run a step, and count the Python functions that it enters. `own` are the folders of the system's files."""

        def count(frame: FrameType, event: str, _: Any) -> None:
            if event != "call" or (file := frame.f_code.co_filename).startswith(_SIMULATION):
                return
            self.counts["all calls"] += 1
            self.counts["own calls"] += file.startswith(own)
            if (name := _NAMED.get(frame.f_code)) is not None:
                self.counts[name] += 1

        gc.disable()  # finalizers are Python functions, too
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
            gc.enable()


def _like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return other memory of the same layout, because no view of a gather buffer may outlive its use."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device).zero_()


def _zeroed(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `empty` with zeros but without another operator, because kernels that do nothing leave memory as it is."""

    def zeros(*arguments: Any, **options: Any) -> Tensor:
        made = empty(*arguments, **options)
        if made.device.type == "cpu":
            memset(made.data_ptr(), 0, made.nbytes)
        return made

    return zeros


def _reports_of_a_gpu(*arguments: Any, waits: object, **options: Any) -> FailureReports:
    """Return failure reports without waits, which only a host without a GPU sees."""
    del waits
    return FailureReports(*arguments, waits=None, **options)


def _cuda(_: str) -> Any:
    return torch.cuda


def connect(slice_nbytes: int, group: dist.ProcessGroup | None, route: Route) -> Transport:
    """Return a transport of NCCL whose slices have at most `slice_nbytes`."""
    transport = connect_as_over_nccl(group, route)
    assert isinstance(transport, GroupCollectives)
    transport.slice_nbytes = slice_nbytes
    return transport


@contextmanager
def _on_a_gpu(counts: Counts, slice_nbytes: int) -> Iterator[dist.ProcessGroup]:
    """Be rank 0 of `RANKS` with a simulated GPU. CPU tensors take the code path of a GPU."""
    own_data = SimpleNamespace(__get__=torch._C.TensorBase.data.__get__, __set__=counts.set_data)
    fsdp2 = [module for name, module in sys.modules.items() if "fsdp._fully_shard" in name]
    patches = [
        (torch.cuda, "is_available", lambda: False),  # otherwise models would use a GPU of this machine
        (parameters, "_own_data", own_data),
        (import_module("shardlite_kernels.scale"), "_table", lambda *_: (_TABLE, 1)),  # else addresses change counts
        (context, "Traffic", mock.Mock(return_value=Traffic(torch.device("cuda")))),
        (context, "FailureReports", _reports_of_a_gpu),
        *((place, name, _zeroed(getattr(place, name))) for place, name in ((torch, "empty"), (Tensor, "new_empty"))),
        *((module, "_get_device_handle", _cuda) for module in fsdp2 if hasattr(module, "_get_device_handle")),
    ]
    with ExitStack() as stack:
        stack.enter_context(counts.cuda.in_place())
        group = stack.enter_context(fake_group(RANKS, counts.exchange))
        stack.enter_context(as_one_rank(partial(connect, slice_nbytes), counts.cuda.queue))
        stack.enter_context(replaced({launch: counts.launch, use_triton: lambda _: True, is_here: lambda _: False}))
        for place, name, value in patches:
            stack.enter_context(mock.patch.object(place, name, value))
        yield group


def count(block: str, system: str, layers: int) -> Counts:
    """Count a steady step of a model of so many blocks."""
    counts, workload = Counts(), BLOCKS[block](layers)
    workload.parameters()  # imports transformers, before `torch.cuda` is patched
    gc.freeze()  # so that collections are short
    with _on_a_gpu(counts, SLICES[block]) as group:
        trainer = BUILDS[system](workload, group)
        trainer = replace(trainer, max_norm=None if system == "in_backward" else _CLIP)  # in_backward cannot clip
        step = partial(trainer.step, workload.batch(0, 0))
        for _ in range(_WARM_UP):
            step()
        counts.count_hooks(workload.units(trainer.model))
        gc.collect()
        counts.counts.clear()
        counts.profile(step, _OWN.get(system, _SHARDLITE))
        found = Counter(counts.counts)
        found += operators(step)  # in another step, because the library has more calls in PyTorch's modes
        del trainer, step
        gc.collect()  # finalizers need the simulated streams
    gc.unfreeze()
    counts.counts = found
    return counts


def measure_counts() -> list[Row]:
    """Return a row of counts for each block and system."""
    rows: list[Row] = []
    for block, system in product(BLOCKS, BUILDS):
        few, many = (count(block, system, layers).counts for layers in (_FEW, _MANY))
        counts = {key: round((many[key] - few[key]) / (_MANY - _FEW)) for key in sorted(many)}
        names = {"block": block, "system": system, "ranks": RANKS, "transformers": version("transformers")}
        words = "work of the host per block and step on the code path of a GPU"
        rows.append({"bench": "host-gpu-path", "words": words, **names, **machine(), **counts})
    return rows


# ---- launches -------------------------------------------------------------------------------------------------------


class _Driver:
    """A driver of Triton for a GPU of compute capability 9.0 that launches nothing."""

    utils = SimpleNamespace(
        load_binary=lambda *_: (None, None, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
    )
    launcher_cls = staticmethod(lambda *_: lambda *_: None)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)

    def get_current_target(self) -> Any:
        """Return the target for which Triton compiles."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def launched(device: torch.device) -> dict[str, Launch]:
    """Return the arguments of a launch of each kernel in a step, with zeros on a device."""
    in_backward, exact = (count("llama", system, _FEW).launched for system in ("in_backward", "exact"))
    found = {"adamw, adding rows": in_backward["adamw"], **exact}
    return {name: tree_map_only(Tensor, partial(_like, device=device), each) for name, each in found.items()}


def measure_launches() -> list[Row]:
    """Return a row for each kernel: the CPU time of a launch with the arguments of a step."""
    from triton.runtime.driver import driver

    rows: list[Row] = []
    with mock.patch.object(driver, "_active", _Driver()):
        for name, (arguments, options) in launched(torch.device("cpu")).items():
            call = partial(launch, *arguments, **options)
            call()  # compiles
            names = {"kernel": name, "triton": version("triton")}
            words = "CPU time of launching a kernel, without the driver"
            spent = quantiles("us", [_microseconds(call) for _ in range(_ROUNDS)], 1)
            rows.append({"bench": "host-launch", "words": words, **names, **machine(), **spent})
    return rows


def _microseconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    before = process_time()
    for _ in range(_BATCH):
        call()
    return 1e6 * (process_time() - before) / _BATCH


# ---- tables ---------------------------------------------------------------------------------------------------------


def counts_of(row: Row) -> dict[str, int]:
    """Return the counts of a row."""
    return {key: value for key, value in row.items() if key not in _COMMON}


def render(rows: Sequence[Row]) -> str:
    """Return a table for each block, with a line per count and a column per system, and a table of launches."""
    tables = []
    for block in BLOCKS:
        if counted := [row for row in rows if row.get("block") == block]:
            tables.append(_render_block(counted))
    if timed := [row for row in rows if row["bench"] == "host-launch"]:
        tables.append(render_rows(timed))
    return "\n\n".join(tables)


def _render_block(rows: Sequence[Row]) -> str:
    keys = sorted({key for row in rows for key in counts_of(row)}, key=lambda key: (key.endswith("calls"), key))
    cells = [[rows[0]["block"], *(row["system"] for row in rows)]]
    cells += [[key, *(f"{row.get(key, 0) or ''}" for row in rows)] for key in keys]
    return f"{rows[0]['words']}, {rows[0]['ranks']} ranks; {where(rows[0])}.\n\n{markdown_table(cells)}"


def measure(kinds: Sequence[str]) -> list[Row]:
    """Return the rows of some kinds, or of all if none is named."""
    return [row for kind, rows in KINDS.items() if kind in kinds or not kinds for row in rows()]


KINDS: Mapping[str, Callable[[], list[Row]]] = {"counts": measure_counts, "launches": measure_launches}
"""The kinds of rows: values of `--gpu-path`."""
