"""Compile a Triton kernel for a GPU that this machine need not have, and read the machine code.

Every access of global memory is traced back to the argument from which its address was computed. Addresses are followed
through registers, from the first instruction to the last. Instructions that a branch skips are also read, so counts are
those of all code and not of one execution.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import triton
from shardlite_kernels.launch import _THREADS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)

_NO_RESULT = ("s_cmp", "s_bitcmp", "s_cbranch", "s_waitcnt", "s_barrier", "ds_write", "global_store", "buffer_store")
"""Instructions of AMD GPUs that do not write their first operand."""

Accesses = dict[str, list[int]]
"""For each argument, the bits of every access by a thread."""


class Launch(NamedTuple):
    """Arguments of a compilation by Triton: types of arguments, and constants."""

    kernel: Any
    pointers: Mapping[str, str]
    """Dtypes of pointer arguments, in Triton's notation. Pointers that are not listed are `None`."""

    constants: Mapping[str, Any]
    """Constants, including `BLOCK`."""

    counts: str = "i32"
    """Type of counts of elements and of positions. Triton uses "i64" for values from 2^31 on."""


def compile_for(target: GPUTarget, launch: Launch, *, hinted: bool = True) -> Any:
    """Return the compiled kernel. All addresses are assumed to be multiples of 16 bytes.

    If `hinted`, integers that are divisible by 16 in a real launch are declared divisible, as Triton does in a launch.
    """
    constants: dict[tuple[int, ...], Any] = {}
    attributes, signature = {}, {}
    for place, (parameter, kind) in enumerate(zip(launch.kernel.params, _types(launch), strict=True)):
        signature[parameter.name] = kind
        known = hinted and not parameter.do_not_specialize
        for path, name, each in _leaves((place,), parameter.name, kind):
            if each == "constexpr":
                constants[path] = launch.constants.get(name)
            elif each.startswith("*") or (known and _is_divisible(name, each)):
                attributes[path] = [["tt.divisibility", 16]]
        if parameter.name == "AMD":
            constants[place,] = target.backend == "hip"
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": _THREADS // target.warp_size, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def read(target: GPUTarget, launch: Launch, compiled: Any) -> dict[str, Any]:
    """Return counts of a kernel's machine code.

    These are `registers` of a thread (32 bits each), bytes that are `spilled`, bytes of `shared` memory, `barriers`,
    all `instructions`, and `accesses`. On NVIDIA GPUs, there are also `inexact` instructions, and `divisions` of 64-bit
    integers, which take about a hundred instructions each.
    """
    if target.backend == "cuda":
        figures = _read_nvidia(compiled.asm["cubin"], compiled.asm["ptx"], launch)
    else:
        figures = _read_amd(compiled.asm["amdgcn"], launch)
    return {**figures, "shared": compiled.metadata.shared}  # the launch requests it, so the code does not contain it


Kind = str | tuple[str, ...]
"""Type of an argument, or the types of the fields of a named tuple."""


def _types(launch: Launch) -> list[Kind]:
    """Return the type of each argument, in order, from the annotations of the kernel."""

    def of(name: str, annotation: str) -> str:
        if name in launch.constants:
            return "constexpr"
        if name.endswith("_ptr") or annotation == "Tensor":
            dtype = launch.pointers.get(name.removesuffix("_ptr"))
            return "constexpr" if dtype is None else f"*{dtype}"
        return launch.counts if annotation in ("tensor", "int") else annotation  # a count of elements

    types: list[Kind] = []
    for parameter in launch.kernel.params:
        record = launch.kernel.fn.__globals__.get(parameter.annotation)
        if not hasattr(record, "_fields"):
            types.append(of(parameter.name, parameter.annotation))
            continue
        hints = get_type_hints(record)
        kinds = [of(name, "int" if hints[name] is int else "Tensor") for name in record._fields]
        there = any(kind.startswith("*") for kind in kinds)
        types.append(record(*kinds) if there else "constexpr")
    return types


def _leaves(path: tuple[int, ...], name: str, kind: Kind) -> Iterator[tuple[tuple[int, ...], str, str]]:
    """Yield the path, the name and the type of an argument, or of each field of a named tuple."""
    if isinstance(kind, str):
        yield path, name, kind
        return
    for i, (field, each) in enumerate(zip(kind._fields, kind, strict=True)):  # type: ignore[attr-defined]
        yield (*path, i), field, each


def _is_divisible(name: str, kind: str) -> bool:
    """Return whether an argument is divisible by 16, like lengths, strides and positions, but not counts of blocks.

    Shards and rows of a buffer are padded so that their lengths are divisible.
    """
    return kind in ("i32", "i64") and not name.startswith("blocks")


class _Arguments:
    """Positions of arguments in constant memory."""

    def __init__(self, launch: Launch) -> None:
        self.names: dict[int, str] = {}
        end = 0
        arguments = zip(launch.kernel.params, _types(launch), strict=True)
        leaves = chain.from_iterable(_leaves((), each.name, kind) for each, kind in arguments)
        for _, name, kind in leaves:
            if kind == "constexpr":
                continue
            size = 8 if kind.startswith("*") or kind.endswith("64") else 4
            end = -(-end // size) * size
            if kind.startswith("*"):
                self.names[end] = name.removesuffix("_ptr")
            end += size
        self.size = -(-end // 8) * 8 + 16  # two more pointers, to Triton's scratch memory

    def at(self, offset: int) -> set[str]:
        """Return the name of the pointer that contains the byte at `offset`, or an empty set."""
        return {self.names[start] for start in (offset // 8 * 8,) if start in self.names}


def _behind(found: set[str]) -> set[str]:
    """Return the sources of a value loaded from `found`. A value from `slot_table` is an address in `slots`."""
    return {f"{name.removesuffix('_table')}s" for name in found if name.endswith("_table")}


class _Registers(dict[str, set[str]]):
    """For each register, the arguments from which its value was computed."""

    def sources(self, names: Iterable[str]) -> set[str]:
        """Return the arguments of any of these registers."""
        return set().union(*(self.get(name, set()) for name in names))


# ---- NVIDIA -------------------------------------------------------------------------------------------------------


def _read_nvidia(cubin: bytes, ptx: str, launch: Launch) -> dict[str, Any]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True)
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    constant = int(re.findall(r"CONSTANT\[0\]:(\d+)", done.stdout)[0])  # arguments are at the end of this bank
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:(@\S+)\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;"
    code = re.findall(line, done.stdout, re.MULTILINE)
    arguments = _Arguments(launch)
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "barriers": sum(name.startswith("BAR") for _, name, _ in code),
        "instructions": sum(name.split(".")[0] not in ("NOP", "BRA") for _, name, _ in code),
        "inexact": sorted(set(re.findall(r"div\.full\S*|\w+\.approx\S*|\S+\.ftz\S*", ptx))),
        "divisions": sorted(set(re.findall(r"(?:div|rem)\.[su]64", ptx))),
        "accesses": _nvidia_accesses(code, arguments, constant - arguments.size),
    }


class _GuardedRegisters:
    """Registers of a program whose instructions may have a guard: those with the same guard execute together."""

    def __init__(self) -> None:
        self.always, self.under = _Registers(), defaultdict[str, _Registers](_Registers)

    def sources(self, names: Iterable[str], guard: str) -> set[str]:
        """Return the arguments of the registers that an instruction with this guard reads."""
        here = self.under[guard]
        return set().union(*(here[name] if name in here else self.always.sources([name]) for name in names))

    def write(self, name: str, sources: set[str], guard: str) -> None:
        """Record the register that an instruction writes. `guard` is empty for an instruction without a guard."""
        if guard:
            self.under[guard][name] = sources
            self.always[name] = sources | self.always.sources([name])
            return
        self.always[name] = sources
        for registers in self.under.values():
            registers.pop(name, None)

    def forget(self, predicates: Iterable[str]) -> None:
        """Drop the records for guards with these predicates, because the predicates have been overwritten."""
        for name in predicates:
            self.under.pop(f"@{name}", None)
            self.under.pop(f"@!{name}", None)


def _nvidia_accesses(code: Iterable[tuple[str, str, str]], arguments: _Arguments, base: int) -> Accesses:
    """Return the accesses of instructions (guard, name, operands). Arguments start at offset `base` of constant memory.

    If a pair of registers has an address, only the lower register is followed.
    """
    registers, accesses = _GuardedRegisters(), Accesses()
    for guard, name, text in code:
        # A descriptor describes all memory, so it belongs to no argument.
        operands = re.sub(r"desc\[\w+\]", "", text).split(", ")
        result = _nvidia_result(name, operands)
        read = [operand for i, operand in enumerate(operands) if i != result]
        sources = registers.sources(_nvidia_registers(" ".join(read)), guard)
        constants = [int(offset, 16) - base for offset in re.findall(r"c\[0x0\]\[0x([0-9a-f]+)\]", text)]
        bits = 64 if re.search(r"WIDE|\.64|^CS2R$", name) else 32
        if name.startswith(("LD", "ST")):
            bits = int((re.findall(r"\.[US]?(8|16|64|128|256)\b", name) or ["32"])[-1])
        if name.startswith(("LD", "ST", "PRMT", "ATOM")):
            # Values that are loaded or assembled from bytes are no addresses, unless they come from a table.
            sources = set()
        if name.startswith(("LDG", "STG")):
            address = next(operand for operand in operands if operand.startswith("["))
            found = registers.sources(_nvidia_registers(address), guard)
            sources = _behind(found)
            accesses.setdefault(_only(found), []).append(bits)
        registers.forget(operand for operand in operands[:3] if re.fullmatch(r"U?P\d", operand))
        if result is not None and (first := _nvidia_registers(operands[result])):
            kind, _, lowest = first[0].partition("R")
            for i in range(max(1, bits // 32)):
                of_constants = set().union(*(arguments.at(at + 4 * i) for at in constants))
                registers.write(f"{kind}R{int(lowest) + i}", sources | of_constants, guard)
    return accesses


def _nvidia_registers(operands: str) -> list[str]:
    return re.findall(r"\bU?R\d+\b", operands)


def _nvidia_result(name: str, operands: list[str]) -> int | None:
    """Return the index of the operand that is written, or `None` if no register is written."""
    if name.startswith(("ST", "RED", "BAR", "CALL", "RET", "BRA", "EXIT", "FCHK")):
        return None
    if not re.fullmatch(r"U?P(\d|T)", operands[0]):
        return 0
    # The first operand is a predicate. The second operand may be the register that is written.
    return 1 if name.startswith(("SHFL", "LOP3", "ULOP3", "IADD3", "UIADD3")) else None


# ---- AMD ----------------------------------------------------------------------------------------------------------


def _read_amd(assembly: str, launch: Launch) -> dict[str, Any]:
    code = re.findall(r"^(?:([.\w]+):|\s+([a-z]\w+)[ \t]*([^;\n]*))", assembly, re.MULTILINE)

    def figure(name: str) -> int:
        return sum(map(int, re.findall(rf"\.{name}: *(\d+)", assembly)))

    return {
        "registers": figure("vgpr_count"),
        # Scalar registers spill to lanes of vector registers, and beyond these to the private segment.
        "spilled": figure("vgpr_spill_count") + figure("private_segment_fixed_size"),
        "barriers": sum(name == "s_barrier" for _, name, _ in code),
        "instructions": sum(bool(name) for _, name, _ in code),
        "inexact": [],
        "divisions": [],
        "accesses": _amd_accesses(code, _Arguments(launch)),
    }


def _amd_accesses(code: list[tuple[str, str, str]], arguments: _Arguments) -> Accesses:
    """Return the accesses of a program of labels and instructions (label, name, operands).

    Branch targets may be after the end of the program. So every branch is followed with the state of the
    registers at the branch, until the combined state at each target no longer changes.
    """
    places = {label: i for i, (label, _, _) in enumerate(code) if label}
    known: dict[int, _Registers] = {0: _Registers()}
    found: dict[int, set[str]] = {}
    waiting = [0]

    def goes_to(place: int, registers: _Registers) -> None:
        before = known.get(place)
        joined = _Registers({name: registers.sources([name]) for name in registers})
        for name, names in (before or {}).items():
            joined[name] = joined.sources([name]) | names
        if joined != before:
            known[place] = joined
            waiting.append(place)

    while waiting:
        place = waiting.pop()
        registers = _Registers(known[place])
        for i, (label, name, text) in enumerate(code[place:], place):
            if label and i > place:
                goes_to(i, registers)
                break
            if name.startswith(("s_cbranch", "s_branch")):
                goes_to(places[text.strip()], registers)
            if name in ("s_branch", "s_endpgm"):
                break
            if name and (address := _amd_step(name, text, registers, arguments)) is not None:
                found[i] = address

    accesses = Accesses()
    for i, names in sorted(found.items()):
        accesses.setdefault(_only(names), []).append(_amd_bits(code[i][1]))
    return accesses


def _amd_step(name: str, text: str, registers: _Registers, arguments: _Arguments) -> set[str] | None:
    """Update the registers for one instruction. If it is an access, return the arguments of its address."""
    operands = [operand.strip() for operand in text.split(",")]
    sources = registers.sources(register for operand in operands[1:] for register in _amd_registers(operand))
    written = [] if name.startswith(_NO_RESULT) else _amd_registers(operands[0])
    if name.startswith("v_writelane"):  # lanes of a register may hold unrelated scalars
        written = [f"{operands[0]} lane {operands[2]}"]
    if name.startswith("v_readlane") and (lane := f"{operands[1]} lane {operands[2]}") in registers:
        sources = registers[lane]
    address = None
    if _amd_bits(name):
        # The second operand of a store is the data.
        of_address = operands[::2] if name.startswith("global_store") else operands[1:]
        address = registers.sources(register for operand in of_address for register in _amd_registers(operand))
    if name.startswith("s_load") and operands[1] == "s[0:1]" and operands[2].startswith("0x"):
        for i, register in enumerate(written):
            registers[register] = arguments.at(int(operands[2], 16) + 4 * i)
    else:
        # A loaded value is no address, unless it was loaded from a table.
        loaded = _amd_bits(name) or name.startswith(("s_load", "ds_read", "global_atomic"))
        registers |= dict.fromkeys(written, _behind(address or sources) if loaded else sources)
    return address


def _amd_bits(name: str) -> int:
    """Return the bits of an access of global memory, or 0 for other instructions."""
    access = re.fullmatch(r"(?:global|buffer)_(?:load|store)_(?:[us]?(byte|short)|dword(?:x(\d))?)\w*", name)
    return {"byte": 8, "short": 16}.get(access[1], 32 * int(access[2] or 1)) if access else 0


def _amd_registers(operand: str) -> list[str]:
    match = re.match(r"([sv])(?:(\d+)$|\[(\d+):(\d+)\])", operand)
    if not match:
        return []
    first, last = (match[2], match[2]) if match[2] else (match[3], match[4])
    return [f"{match[1]}{i}" for i in range(int(first), int(last) + 1)]


def _only(found: set[str]) -> str:
    """Return the name of the accessed argument, or a text that is no argument's name if there is not exactly one."""
    return " or ".join(sorted(found)) or "unknown"
