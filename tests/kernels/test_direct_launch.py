"""Launches that skip Triton's binding and caching: they launch what Triton would launch. See `stub_driver.py`."""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple, get_type_hints

import pytest
import torch
import triton
from shardlite_kernels import State, hop, launch
from shardlite_kernels.adamw import adamw
from shardlite_kernels.hop import _hop_kernel
from shardlite_kernels.scalars import Table

from bench.kernels.cases import DTYPES, cases
from tests.kernels.stub_driver import Pointer, StubDriver

pytestmark = pytest.mark.skipif(launch.INTERPRET, reason="the interpreter launches nothing")

CASES = cases()
KERNELS = list({case.code: None for case in CASES})
SIZES = (1, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 16)
MISALIGNED = 8
GPUS = [torch.device("cuda", i) for i in range(2)]


class Call(NamedTuple):
    """A call of `launch`."""

    kernel: Any
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self) -> None:
        launch.launch(self.kernel, *self.args, **self.keywords)


@pytest.fixture
def gpus(monkeypatch):
    return StubDriver(monkeypatch, KERNELS)


def call_of(case: Any, offsets: Mapping[str, int], numbers: Mapping[str, int]) -> tuple[Call, list[str], list[str]]:
    """A launch of a case, and the names of its tensors and of its numbers. A tensor is at a multiple of 16 bytes plus
    its offset. A number is 64 if it is not in `numbers`."""
    kernel, pointers, constants, _ = case.launch
    addresses, tensors, counts = count(1 << 30, 1 << 20), [], []

    def pointer(name: str) -> Pointer | None:
        if name not in pointers:
            return None
        tensors.append(name)
        return Pointer(DTYPES[pointers[name]], next(addresses) + offsets.get(name, 0))

    def number(name: str) -> int:
        counts.append(name)
        return numbers.get(name, 64)

    args: list[Any] = []
    for parameter in kernel.params[: kernel.arg_names.index("n")]:
        record = kernel.fn.__globals__.get(parameter.annotation)
        if hasattr(record, "_fields"):
            hints = get_type_hints(record)
            fields = [number(name) if hints[name] is int else pointer(name) for name in record._fields]
            args.append(record(*fields) if any(isinstance(each, Pointer) for each in fields) else None)
        elif parameter.name == "divisor":
            args.append(3.0)
        elif parameter.name.endswith("_ptr"):
            args.append(pointer(parameter.name.removesuffix("_ptr")))
        else:
            args.append(number(parameter.name))
    block = {"block": constants["BLOCK"], "together": 8 if case.kernel.startswith("ring") else None}
    flags = {name: value for name, value in constants.items() if name != "BLOCK"}
    return Call(kernel, tuple(args), {"n": numbers.get("n", 4096), **block, **flags}), tensors, counts


def calls_of(case: Any) -> Iterator[Call]:
    """Launches of a case with each alignment and each size."""
    call, tensors, counts = call_of(case, {}, {})
    yield call
    for names in (*([name] for name in tensors), tensors):
        yield call_of(case, dict.fromkeys(names, MISALIGNED), {})[0]
    for name in ("n", *counts):
        for size in SIZES:
            yield call_of(case, {}, {name: size})[0]


@pytest.mark.parametrize("kernels", [*sorted({case.kernel for case in CASES}), "stats scale"])
def test_what_is_launched_is_what_triton_launches(gpus, kernels):
    """For each dtype, alignment and size: the same compiled kernel, with the same arguments.

    `stats` and `scale` have arguments of the same types.
    """
    names = kernels.split() if kernels == "stats scale" else [kernels]
    calls = [call for case in CASES if case.kernel in names for call in calls_of(case)]
    for call in calls:
        launch._COMPILED.clear()
        call()
    expected = gpus.launched
    assert gpus.by_triton == len(calls) == len(expected)

    gpus.launched = []
    launch._COMPILED.clear()
    for call in [*calls, *calls]:
        call()
    assert gpus.launched == [*expected, *expected]
    assert gpus.by_triton == len(calls) + len(launch._COMPILED) < 2 * len(calls)  # once for each specialization


def test_tensors_are_launched_by_their_addresses(gpus, monkeypatch):
    """From the functions that users call, at both alignments."""
    memory = torch.zeros(4, 1024 + 4)
    rows = Table(torch.zeros(32, dtype=torch.int16), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 10))
    monkeypatch.setattr(torch.Tensor, "device", property(lambda tensor: GPUS[0]), raising=False)
    for start in (0, 0, 1, 0, 1):
        param, avg, sq, grad = memory[:, start : start + 1024]
        hop(param, avg, sq, 3)
        adamw(State(param, avg, sq), grad, rows)
        addition, step = gpus.launched[-2:]
        assert addition.arguments[:5] == (param.data_ptr(), avg.data_ptr(), sq.data_ptr(), None, 3.0)
        assert step.arguments[0] == (param.data_ptr(), avg.data_ptr(), sq.data_ptr(), None, None, None)
    names = [launched.function for launched in gpus.launched]
    assert names[0:2] == names[2:4] == names[6:8]
    assert names[4:6] == names[8:10]
    assert len(set(names)) == gpus.by_triton == 4


def some_call(kernel: Any = _hop_kernel) -> Call:
    call = next(call for case in CASES if case.code is _hop_kernel for call in calls_of(case))
    return call._replace(kernel=kernel)


def test_a_launch_is_on_the_current_stream_of_the_device_of_its_tensors(gpus):
    call = some_call()
    call()
    gpus.streams = [5, 6]
    call()
    for pointer in call.args[:3]:
        pointer.device = GPUS[1]
    call()
    call()
    streams = [("stream", 0, 0), ("stream", 0, 5), ("stream", 1, 6), ("stream", 1, 6)]
    assert [launched.stream for launched in gpus.launched] == streams
    assert [launched.function[1] for launched in gpus.launched] == [0, 0, 1, 1]
    assert (gpus.by_triton, gpus.device) == (2, 0)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called(gpus, hook):
    call, seen = some_call(), []

    def see(metadata: Any) -> None:
        seen.append(metadata.get())

    call()
    chain = getattr(triton.knobs.runtime, hook)
    chain.add(see)
    call()
    chain.remove(see)
    call()
    assert [(each["name"], each["stream"]) for each in seen] == [("_hop_kernel", gpus.get_current_stream(0))]
    assert (gpus.by_triton, len(gpus.launched), len(set(gpus.launched))) == (1, 3, 1)


def test_constants_are_told_apart_by_their_names(gpus):
    call = some_call()
    block = {"n": 4096, "block": 1024}
    call._replace(keywords={**block, "NATIVE": False, "DIVIDE": True, "STATS": False})()
    call._replace(keywords={**block, "DIVIDE": False, "NATIVE": True, "STATS": False})()
    assert gpus.launched[0].function != gpus.launched[1].function
    assert [launched.arguments[-4:-1] for launched in gpus.launched] == [(False, True, False), (True, False, False)]


def test_kernels_are_compiled_again_for_other_options(gpus, monkeypatch):
    call = some_call()
    call()
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    call()
    call()
    call._replace(keywords={**call.keywords, "together": 4})()
    first, debug, again, cooperative = (launched.function for launched in gpus.launched)
    assert debug == again
    assert len({first, debug, cooperative}) == gpus.by_triton == 3


class Wrapped:
    """An object with the interface of a kernel, as autotuned kernels are: it may launch something else each time."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return self.kernel[grid]


def test_only_a_kernel_itself_is_launched_directly(gpus):
    call = some_call(Wrapped(_hop_kernel))
    call()
    call()
    assert gpus.by_triton == 2
    assert not launch._COMPILED


def test_nothing_is_kept_of_a_launch_that_a_hook_prevents(gpus, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **_: True)
    some_call()()
    assert not launch._COMPILED
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    some_call()()
    assert len(gpus.launched) == len(launch._COMPILED) == 1


def test_machine_code_is_launched(gpus, monkeypatch, tmp_path):
    """Compiled by Triton, once for each alignment."""
    monkeypatch.setattr(triton.compiler, "compile", triton.compiler.compiler.compile)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpus, "launcher_cls", lambda src, metadata: lambda *args: gpus.launched.append(args))
    case = next(case for case in CASES if case.kernel == "cast")
    aligned, misaligned = (call_of(case, {"out": offset}, {})[0] for offset in (0, MISALIGNED))
    for call in (aligned, misaligned, aligned, misaligned):
        call()
    codes = [args[4][0] for args in gpus.launched]
    assert codes[:2] == codes[2:]
    assert codes[0] != codes[1]
    assert all(code.startswith(b"\x7fELF") for code in codes)
    assert gpus.by_triton == 2


def test_launches_are_direct_with_this_triton():
    """If a new version of Triton passes the other tests here with `_DIRECT = True`, it belongs to `_DIRECT`."""
    assert (torch.version.hip is None) == launch._DIRECT


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_no_global_that_a_kernel_reads_is_assigned_twice(kernel):
    """Triton would notice a change. A direct launch does not look."""
    assert kernel.cache_key
    for (name, _), (value, globals_) in kernel.used_global_vals.items():
        assert isinstance(value, (triton.language.constexpr, type))
        tree = ast.parse(inspect.getsource(sys.modules[globals_["__name__"]]))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
        assert sum(isinstance(node.ctx, ast.Store) for node in names) <= 1
        assert not any(name in node.names for node in ast.walk(tree) if isinstance(node, ast.Global))
