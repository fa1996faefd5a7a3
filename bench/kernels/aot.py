"""Compile every kernel ahead of time for several GPUs, print a table of the generated code, and check it.

    python bench/kernels/aot.py            compiles all kernels for four targets and prints the table; exits with 1 and
                                           prints the errors if a check fails
    python bench/kernels/aot.py --write    writes the table to bench/results/kernels-compiled.md
    python bench/kernels/aot.py --check    also exits with 1 if the table in this file differs

These are errors: registers are spilled; a thread's access to an element tensor has fewer bits than it could have, up to
128; the machine code moves another number of bytes than the kernel's formula gives; a 64-bit integer is divided; or a
kernel that promises equal bits has an instruction that is not exact.

*Element tensors* have `S` elements. Their bytes per element are counted in the machine code: the bits of a thread's
accesses, divided by the number of its elements. If the compiler has copied the body of a loop, all tensors have several
times as many accesses, and the result is divided by the number of copies. Bytes of *side tables* are computed by
formula if groups of elements share an entry, and not counted if the size of the table is fixed. No number is measured;
all numbers are derived from the code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# With these paths, the imports work even if this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from shardlite_kernels.launch import _THREADS

from bench.kernels.cases import DTYPES, cases
from bench.kernels.machine_code import TARGETS, compile_for, read

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "bench" / "results" / "kernels-compiled.md"
CONSTRAINTS = ROOT / "constraints.txt"
BEGIN, END = "<!-- made by `python bench/kernels/aot.py --write` -->\n", "<!-- end of what was made -->\n"
WORKERS = 2


# ---- compilation and checks ---------------------------------------------------------------------------------------


def compiled_row(case_and_target: tuple[int, str], *, hinted: bool = True, counts: str = "i32") -> Row:
    """Compile one case for one target, and return its row.

    If not `hinted`, the compiler gets no information on the divisibility of lengths. `counts` is the type of lengths.
    """
    number, target = case_and_target
    case = cases()[number]
    launch = case.launch._replace(counts=counts)
    figures = read(TARGETS[target], launch, compile_for(TARGETS[target], launch, hinted=hinted))
    per_thread = case.block // _THREADS
    side_bytes = sum(use.bytes for use in case.uses.values() if use.share != 1)
    accesses = figures.pop("accesses")
    widths = {name: bits for name, bits in accesses.items() if name in case.elements}
    once = {name: per_thread * 8 * use.bytes for name, use in case.elements.items()}
    copies = {sum(bits) / once[name] for name, bits in widths.items()}
    copied = copies.pop() if len(copies) == 1 else 1
    return {
        **{"kernel": case.kernel, "format": case.format, "gradient": case.gradient, "target": target},
        **{"per_thread": per_thread, "exact": case.exact, "triton": triton.__version__},
        **figures,
        "widths": widths,
        "widest": {name: min(128, per_thread * 8 * DTYPES[case.uses[name].dtype].itemsize) for name in widths},
        "side_widths": {name: bits for name, bits in accesses.items() if name in case.uses and name not in widths},
        "unknown": sorted(accesses.keys() - case.uses.keys()),
        "bytes": sum(map(sum, widths.values())) / 8 / per_thread / (int(copied) or 1) + side_bytes,
        **{"bytes_by_formula": case.bytes, "side_bytes": side_bytes},
    }


def compiled_rows(
    numbers: Sequence[int], targets: Sequence[str], *, workers: int = WORKERS, **settings: Any
) -> list[Row]:
    """Return a `compiled_row` for each of the numbered cases and each target. Rows of a case are consecutive.

    Starting the worker processes takes as long as compiling about ten kernels. With 0 workers, this process compiles.
    """
    compiled, todo = partial(compiled_row, **settings), product(numbers, targets)
    if not workers:
        return list(map(compiled, todo))
    # Spawn processes instead of forking, because torch has threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compiled, todo))


def numbers_of(lines: Sequence[str]) -> list[int]:
    """Return the numbers of the cases whose table line or kernel is in `lines`, or of all cases if `lines` is empty."""
    return [i for i, case in enumerate(cases()) if not lines or {case.kernel, case.line} & {*lines}]


def problems(row: Row) -> list[str]:
    """Return a sentence for each failed check of a row."""
    found: list[str] = []
    if row["spilled"]:
        found.append(f"{row['spilled']} bytes are spilled")
    for name, widths in row["widths"].items():
        if min(widths) < row["widest"][name]:
            found.append(f"{name} is accessed {min(widths)} bits at a time, not {row['widest'][name]}")
    if row["bytes"] != row["bytes_by_formula"]:
        found.append(f"{row['bytes']} bytes per element are moved, by the formula {row['bytes_by_formula']}")
    if row["unknown"]:
        found.append(f"unknown accesses: {', '.join(row['unknown'])}")
    if row["divisions"]:
        found.append(f"64-bit integers are divided: {', '.join(row['divisions'])}")
    if row["exact"] and row["inexact"]:
        found.append(f"not exact: {', '.join(row['inexact'])}")
    who = " ".join(filter(None, [row["kernel"], row["format"], row["gradient"], row["target"]]))
    return [f"{who}: {what}" for what in found]


# ---- the table ----------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "kernel": lambda rows: rows[0]["kernel"],
    "tensors": lambda rows: rows[0]["format"],
    "registers": lambda rows: _by_target(rows, "registers"),
    "spilled": lambda rows: _by_target(rows, "spilled"),
    "shared": lambda rows: _by_target(rows, "shared"),
    "bits per access": lambda rows: _span([bits for row in rows for each in row["widths"].values() for bits in each]),
    "bytes per element: tensors [S]": lambda rows: _by_gradient(rows, "bytes", "side_bytes"),
    "and side tables": lambda rows: _number(rows[0]["side_bytes"]) if rows[0]["side_bytes"] else "",
    "instructions": lambda rows: _instructions(rows),
}


def render(rows: Sequence[Row]) -> str:
    """Return a table with a line for each kernel and format, with the worst value over the dtypes of gradients."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["kernel"], row["format"]), []).append(row)
    cells = [list(COLUMNS), ["---", "---", *["---:"] * (len(COLUMNS) - 2)]]
    for kernel in dict.fromkeys(kernel for kernel, _ in lines):
        cells += [[cell(same) for cell in COLUMNS.values()] for (name, _), same in lines.items() if name == kernel]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _by_target(rows: Sequence[Row], name: str) -> str:
    """Return the values of all targets, or one value if all are equal."""
    worst = [max(row[name] for row in rows if row["target"] == target) for target in _targets(rows)]
    return "/".join(map(str, worst if len(set(worst)) > 1 else worst[:1]))


def _targets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["target"] for row in rows))


def _by_gradient(rows: Sequence[Row], name: str, less: str) -> str:
    return ", ".join(dict.fromkeys(_number(row[name] - row[less]) for row in rows))


def _span(numbers: Sequence[int]) -> str:
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))


def _number(number: float) -> str:
    return f"{number:.5f}".rstrip("0").rstrip(".")


def _instructions(rows: Sequence[Row]) -> str:
    """Return the number of instructions per element on sm_90."""
    counts = [row["instructions"] / row["per_thread"] for row in rows if row["target"] == "sm_90"]
    return f"{max(counts):.0f}" if counts else ""


# ---- the command --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile kernels, print the table, and check it. Return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("lines", nargs="*", help="lines of the table, as 'kernel' or 'kernel: tensors' (all lines)")
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="target; may be repeated (all targets)"
    )
    parser.add_argument("--rows", type=Path, help="read the output of --json instead of compiling")
    parser.add_argument("--unhinted", action="store_true", help="compile without hints on the divisibility of lengths")
    parser.add_argument("--long", action="store_true", help="compile for 2^31 elements or more: lengths have 64 bits")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that compile; 0 for this process")
    parser.add_argument("--json", action="store_true", help="print rows, one JSON object per line")
    parser.add_argument("--write", action="store_true", help="write the table to bench/results/kernels-compiled.md")
    parser.add_argument(
        "--check", action="store_true", help="also fail if lines differ from bench/results/kernels-compiled.md"
    )
    asked = parser.parse_args(arguments)
    if asked.write and (asked.lines or asked.target or asked.unhinted or asked.long):
        parser.error("--write requires the whole table: remove lines, --target, --unhinted and --long")
    if asked.rows:
        rows = [json.loads(line) for line in asked.rows.read_text().splitlines()]
    elif os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    else:
        numbers = numbers_of(asked.lines)
        if not numbers:
            parser.error(f"there is no line of these names: {asked.lines}")
        settings = {"hinted": not asked.unhinted, "counts": "i64" if asked.long else "i32"}
        rows = compiled_rows(numbers, asked.target or list(TARGETS), workers=asked.workers, **settings)
    wrong = [problem for row in rows for problem in problems(row)]
    print("\n".join(map(json.dumps, rows)) if asked.json else render(rows))
    if asked.write and not wrong:
        write(render(rows))
    if asked.check and same_compiler(rows[0]["triton"]):
        wrong += differences(render(rows), whole=not asked.lines)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def same_compiler(version: str) -> bool:
    """Return whether `version` is the pinned Triton. Other versions may generate other code."""
    same = f"triton=={version}" in CONSTRAINTS.read_text().splitlines()
    if not same:
        print(
            f"not compared: the table there was made by the Triton in constraints.txt, not {version}", file=sys.stderr
        )
    return same


def write(table: str) -> None:
    """Write the table to kernels-compiled.md, between its begin and end marks."""
    before, _, after = _parts()
    TABLE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def differences(table: str, *, whole: bool) -> list[str]:
    """Return the lines of `table` that kernels-compiled.md lacks. If `whole`, also return lines that `table` lacks."""
    got, there = table.split("\n"), _parts()[1].strip("\n").split("\n")
    wrong = [f"not in bench/results/kernels-compiled.md: {line}" for line in got if line and line not in there]
    if whole:
        wrong += [f"only in bench/results/kernels-compiled.md: {line}" for line in there if line not in got]
    return [*wrong, "to put it right: python bench/kernels/aot.py --write"] if wrong else []


def _parts() -> tuple[str, str, str]:
    before, _, rest = TABLE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table, after


if __name__ == "__main__":
    sys.exit(main())
