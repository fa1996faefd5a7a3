"""Kernels compiled for GPUs that are not present: `bench.kernels.aot`, its table, and its errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton

from bench.kernels import aot
from bench.kernels.cases import cases
from bench.kernels.machine_code import TARGETS, compile_for

ROOT = Path(__file__).parents[2]
KINDS = [
    "adamw: fp32 weights, fp32 moments",
    "adamw unscale: fp32 weights, bf16 moments",
    "reduce_adamw: split24 weights, bf16 moments",
    *("add_rows_adamw: split24 weights, bf16 moments", "add_rows: 8 rows of bf16 to fp32"),
    *(f"add_rows: 8 rows of bf16 to fp32, {order}" for order in ("a tree", "in a bucket")),
    "add_rows_adamw: fp32 weights, bf16 moments, in a bucket",
    *(
        "split",
        "join",
        "stats: bf16",
        "scale: bf16",
        "scale_all: bf16",
        "cast: fp32 to bf16",
        "quantize: bf16 to 8 bits",
    ),
    *("hop: fp32 + fp32 to fp32", "hop, statistics: bf16 + bf16 to bf16", "dequantize: 8 bits to fp32"),
    *("ring reduce-scatter: bf16 by fp32 to bf16", "ring reduce-adamw: split24 weights, int8 moments"),
]
"""One of each kernel: all of them take minutes, and `python bench/kernels/aot.py --check`."""

NEW_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)

MORE = [*KINDS, "adamw: split24 weights, int8 moments", "hop: i8 + i8 to i8"]
ONE_OF_EACH_VENDOR = ["sm_90", "gfx942"]

pytestmark = pytest.mark.xdist_group("aot")  # one worker compiles for all of these tests


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels_are_kept(pytestconfig, tmp_path_factory):
    """For the next run, by their sources."""
    cache = getattr(pytestconfig, "cache", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache.mkdir("triton") if cache else tmp_path_factory.mktemp("triton")))
        yield


class Rows(NamedTuple):
    file: Path
    targets: list[str]
    lines: list[str]

    @property
    def parsed(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in self.file.read_text().splitlines()]


@pytest.fixture(scope="module")
def some_rows(tmp_path_factory):
    compiled = aot.compiled_rows(aot.numbers_of(KINDS), ["sm_90"], workers=0)
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, compiled)))
    return Rows(file, ["sm_90"], KINDS)


@pytest.fixture(scope="module")
def more_rows(tmp_path_factory):
    """From the command, in a shell that knows nothing of this checkout."""
    done = run(["bench/kernels/aot.py", "--json", *MORE])
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(done.stdout)
    return Rows(file, list(TARGETS), MORE)


@pytest.fixture(params=["some_rows", pytest.param("more_rows", marks=pytest.mark.slow)])
def rows(request):
    """A file of rows. Both are made once, in whatever order tests come."""
    return request.getfixturevalue(request.param)


def run(command):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )


def test_nothing_is_wrong_with_kernels_and_the_table_is_theirs(rows, capsys):
    """A line of the table is of all targets."""
    check = ["--check"] if rows.targets == list(TARGETS) else []
    assert aot.main([*check, "--rows", str(rows.file), *rows.lines]) == 0, capsys.readouterr().err


def test_there_is_a_line_for_each_kernel():
    assert {line.partition(": ")[0] for line in KINDS} == {case.kernel for case in cases()}


def test_the_table_has_a_line_for_each_kernel_and_format():
    table = aot.TABLE.read_text().partition(aot.BEGIN)[2].partition(aot.END)[0]
    lines = [line.removeprefix("| ").split(" | ")[:2] for line in table.strip().split("\n")[2:]]
    assert sorted(": ".join(line) for line in lines) == sorted({case.line for case in cases()})


def test_all_targets_were_compiled_for_and_all_accesses_found(rows):
    assert {row["target"] for row in rows.parsed} == {*rows.targets}
    plain = next(row for row in rows.parsed if (row["kernel"], row["gradient"]) == ("adamw", "fp32"))
    assert plain["widths"] == {"param": [128, 128], "exp_avg": [128, 128], "exp_avg_sq": [128, 128], "grad": [128]}
    assert (plain["bytes"], plain["side_bytes"]) == (28 + 1 / 16, 1 / 16)


def test_a_thread_accesses_an_entry_of_a_side_table_once(rows):
    """A row of statistics is two numbers, a factor one, and a scale is a byte.

    Of a table of tensors a thread reads one begin, and the three numbers of the tensor of its program.
    """
    side_bits = {
        **{kernel: {} for kernel in ("split", "join", "cast", "hop")},
        **{kernel: {"stats": 32 + 32} for kernel in ("stats", "hop, statistics", "add_rows")},
        **{kernel: {"scales": 8} for kernel in ("quantize", "dequantize")},
        "scale": {"factor": 32},
        "scale_all": {"factor": 32, "table": 4 * 64},
    }
    ring = {"slot_table": 2 * 64, "flag_table": 3 * 64, "flags": 4 * 64, "error": 64}  # two flags, each in two places
    for row in rows.parsed:
        expected = side_bits_of_adamw(row) if "adamw" in row["kernel"] else side_bits.get(row["kernel"], {})
        amd = row["target"] == "gfx942"
        if row["kernel"].startswith("scale") and amd:  # AMD's scalar unit reads what a program reads once
            expected = {"table": 64} if row["kernel"] == "scale_all" else {}
        if row["kernel"].startswith("ring") and not amd:  # and there tables too, while flags are read by atomics
            expected |= ring
        elif row["kernel"].startswith("ring") and not NEW_TRITON:  # Triton 3.6 has an address for each of the four
            expected |= {"flags": ring["flags"]}
        assert {name: sum(widths) for name, widths in row["side_widths"].items()} == expected, row


def side_bits_of_adamw(row):
    """The number of a row, its scalars (the scale of gradients only where it is needed), a key where bits are random.

    Exponents are read and written. Where they are, threads share groups in another way than elements, so the number of
    the row and whether it is active are read once more.
    """
    coded, unscale = "int8" in row["format"], row["kernel"] == "adamw unscale"
    twice = coded and row["kernel"] == "adamw"  # its threads step twice as many elements
    bits = {"rows": 16 + 16 * coded + 32 * twice, "scalars": 32 * (9 + unscale + coded + 2 * twice)}
    if "fp32 moments" not in row["format"]:
        bits["keys"] = 32
    if coded:
        bits |= {"avg_exponent": 8 + 8, "sq_exponent": 8 + 8}
    if row["kernel"] in ("reduce_adamw", "add_rows_adamw", "ring reduce-adamw"):
        bits["bad"] = 32
    return bits


def test_shared_memory_is_where_the_threads_of_a_program_meet(rows):
    rendezvous = {"reduce_adamw", "add_rows_adamw", "add_rows", "hop, statistics", "stats", "quantize"}
    for row in rows.parsed:
        meets = row["kernel"] in rendezvous or "int8" in row["format"]
        # What one thread has seen, for all; and the number of runs that begin at or before a block.
        flags = 8 if row["kernel"].startswith(("ring", "scale_all")) else 0
        twice = row["kernel"] == "adamw" and "int8" in row["format"]  # codes change places between threads
        assert row["shared"] <= (8192 if twice else 1024 if meets else flags), row


@pytest.mark.parametrize("order", ["", ", in a bucket"])
@pytest.mark.parametrize("line", ["add_rows: 8 rows of bf16 to fp32", "add_rows_adamw: fp32 weights, fp32 moments"])
def test_rows_are_added_in_a_loop_if_they_are_many(line, order):
    case = next(case for case in cases() if case.line == line + order)
    many = case.launch._replace(constants={**case.launch.constants, "UNROLL": 0})
    for target in ONE_OF_EACH_VENDOR:
        few, loop = (compile_for(TARGETS[target], launch).asm["ttgir"] for launch in (case.launch, many))
        assert ("scf.for" in few, "scf.for" in loop) == (False, True)


@pytest.mark.parametrize("line", ["add_rows: 8 rows of bf16 to fp32", "add_rows_adamw: fp32 weights, fp32 moments"])
def test_rows_in_a_bucket_are_read_as_fast_as_staged_ones(line):
    """As many accesses, and as wide ones: of which rows an address is chosen is known before."""
    lines = {case.line: case for case in cases()}
    for target in ONE_OF_EACH_VENDOR:
        plain, moved = (
            compile_for(TARGETS[target], lines[each].launch).asm["ttgir"] for each in (line, line + ", in a bucket")
        )
        assert "scf.for" not in moved
        assert moved.count("tt.load") == plain.count("tt.load")
        assert moved.count("arith.addf") == plain.count("arith.addf")


@pytest.mark.parametrize("line", ["add_rows: 8 rows of bf16 to fp32", "add_rows_adamw: fp32 weights, fp32 moments"])
def test_a_tree_of_rows_is_written_out(line):
    case = next(case for case in cases() if case.line == line)
    tree = case.launch._replace(constants={**case.launch.constants, "STAGED": -1})
    for target in ONE_OF_EACH_VENDOR:
        ring, code = (compile_for(TARGETS[target], launch).asm["ttgir"] for launch in (case.launch, tree))
        assert "scf.for" not in code
        assert code.count("arith.addf") == ring.count("arith.addf")
        assert code.count("tt.load") == ring.count("tt.load")


@pytest.fixture(scope="module")
def ring():
    """What becomes of a ring: the assembly for AMD, and the PTX for NVIDIA."""
    case = next(case for case in cases() if case.line == "ring reduce-scatter: fp32 by fp32 to fp32")
    nvidia, amd = (compile_for(TARGETS[target], case.launch).asm for target in ONE_OF_EACH_VENDOR)
    return {"ptx": nvidia["ptx"], "amdgcn": amd["amdgcn"]}


def in_order(code, **patterns):
    """The names of these patterns as they follow each other in the code."""
    pattern = "|".join(f"(?P<{name}>{each})" for name, each in patterns.items())
    return [match.lastgroup for match in re.finditer(pattern, code)]


def test_signals_are_releases_and_acquires_with_barriers_between_them_and_the_data(ring):
    found = in_order(
        ring["ptx"],
        acquire=r"ld\.global\.sys\.acquire\.b64",
        release=r"atom\.global\.sys\.release\.exch\.b64",
        barrier=r"bar\.sync",
        load=r"ld\.global(?!\.sys)\S*\.v4",
        store=r"st\.global\S*\.v4",
    )
    assert (found.count("acquire"), found.count("release")) == (4, 3)  # each wait looks first, and then again
    for i, name in enumerate(found):
        assert name != "acquire" or found[i + 1] == "barrier"
        assert name != "release" or found[i - 1] == "barrier"
    data = [i for i, name in enumerate(found) if name in ("load", "store")]
    assert data == list(range(data[0], data[-1] + 1))  # in whatever order its blocks are laid out
    assert (found[data[0] - 1], found[data[-1] + 1]) == ("barrier", "barrier")
    before, after = found[: data[0]], found[data[-1] :]
    assert (before.count("release"), after.count("release")) == (1, 2)  # of the beginning; of what was sent and read


@pytest.mark.skipif(
    not NEW_TRITON, reason="Triton 3.6 does not wait for the write-back to memory before a release on gfx942"
)
def test_on_amd_each_wave_waits_for_its_stores_before_the_barrier_of_a_release(ring):
    """The release of the one that signals waits for its own stores only."""
    found = in_order(
        ring["amdgcn"].partition("global_store_dwordx4")[2],
        wait=r"#ASMSTART\s+s_waitcnt vmcnt\(0\)",
        barrier=r"s_barrier",
        release=r"buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)\s+(?:s_nop \d+\s+)?global_atomic_swap_x2",
    )
    signal = [i for i, name in enumerate(found) if name == "release"]
    assert len(signal) >= 2
    for i in signal:
        before = [name for name in found[:i] if name != "barrier"]
        assert before[-1] == "wait"
        assert found[i - 1] == "barrier"


BY_TWO = [*(f"--target={target}" for target in ONE_OF_EACH_VENDOR), "--workers=0"]


def test_an_unknown_length_costs_the_wide_accesses_and_is_reported(capsys):
    """Shards are padded for this reason."""
    assert aot.main(["--unhinted", *BY_TWO, "hop: fp32 + fp32 to fp32"]) == 1
    said = capsys.readouterr().err
    assert "sm_90: own is accessed 32 bits at a time, not 128" in said
    assert "gfx942: own is accessed 32 bits at a time, not 128" in said


@pytest.mark.parametrize(
    "line",
    [
        *("hop: fp32 + fp32 to fp32", "dequantize: 8 bits to fp32"),
        pytest.param("adamw: split24 weights, int8 moments", marks=pytest.mark.slow),
    ],
)
def test_more_than_two_billion_elements_compile_to_the_same_accesses(line, capsys):
    """Lengths, strides and positions have 64 bits then."""
    assert aot.main(["--long", *BY_TWO, line]) == 0, capsys.readouterr().err


def test_no_argument_is_confined_to_32_bits():
    """Triton passes what is annotated with `int` as 32 bits, and what is annotated with `tl.tensor` as it needs."""
    for case in cases():
        confined = {each.name for each in case.code.params if each.annotation_type}
        assert confined <= {"divisor"}, case.line
