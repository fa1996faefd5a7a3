"""Measure the size of the house: `python tools/size.py` prints each number, its ceiling and what changed since a base.

Lines are lines of code: without blanks, comments and docstrings. `tests/project/test_size.py` holds each number to its
ceiling in `tools/ceilings.toml`.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = "kernels/shardlite_kernels"
LABORATORY = ("shardlite/lab", "bench")
CEILINGS = ROOT / "tools" / "ceilings.toml"
LONG_FILE = 450  # lines of any kind
LONG_FUNCTION, LONG_KERNEL = 40, 60  # lines of code
_BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines of `source` that have code."""
    strings: set[int] = set()  # lines of docstrings, including those of attributes
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - strings


def measure(root: Path = ROOT) -> dict[str, int]:
    """Return every number of the house at `root`, by its words."""
    files = {
        path.relative_to(root).as_posix(): path.read_text()
        for package in ("shardlite", KERNELS, "bench", "tests")
        for path in sorted((root / package).rglob("*.py"))
    }
    code = {name: code_lines(source) for name, source in files.items()}
    house = {name: lines for name, lines in code.items() if not name.startswith((*LABORATORY, "tests"))}
    rooms: Counter[str] = Counter()
    for name, lines in code.items():
        rooms[_room(name)] += len(lines)
    closure = import_closure(files)
    kernels = {name for name in house if name.startswith(KERNELS)}
    return {
        **{f"lines of {room}": lines for room, lines in sorted(rooms.items())},
        "lines of the library, kernels included": sum(map(len, house.values())),
        "lines of the laboratory": sum(len(lines) for name, lines in code.items() if name.startswith(LABORATORY)),
        "lines of the import closure of ShardLite": sum(len(code[name]) for name in closure),
        "files in the import closure of ShardLite": len(closure),
        f"files of the library over {LONG_FILE} lines": sum(files[name].count("\n") > LONG_FILE for name in house),
        f"functions over {LONG_FUNCTION} lines": sum(
            length > (LONG_KERNEL if name in kernels else LONG_FUNCTION)
            for name in house
            for length in _functions(files[name], code[name])
        ),
        "names behind the largest door": max(
            _names(source) for name, source in files.items() if name.count("/") == 2 and name.endswith("/__init__.py")
        ),
        "words of the changelog's open section": sum(
            len(path.read_text().split()) for path in (root / "changelog.d").glob("*.md")
        ),
    }


def import_closure(files: dict[str, str], start: str = "shardlite/model.py") -> set[str]:
    """Return the files that importing `start` imports, by imports at the top level of each. Kernels do not count."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        name = ahead.pop()
        if name in files and name not in found:
            found.add(name)
            ahead += _imports(files, files[name])
    return found


def _imports(files: dict[str, str], source: str) -> Iterator[str]:
    """Yield the files that a module imports at its top level, the packages that they lie in included."""
    for node in ast.parse(source).body:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                place = "/".join(parts[:end])
                yield from (name for name in (f"{place}.py", f"{place}/__init__.py") if name in files)


def _room(name: str) -> str:
    """Return the folder of a package that a file lies in, or the package for a file outside of rooms."""
    if name.startswith((KERNELS, "bench", "tests")):
        return KERNELS if name.startswith(KERNELS) else name.split("/")[0]
    parts = name.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else "shardlite/*.py"


def _functions(source: str, code: set[int]) -> Iterator[int]:
    """Yield the lines of code of each function of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def _names(source: str) -> int:
    """Return how many names an `__init__` takes from the files of its room."""
    return sum(len(node.names) for node in ast.parse(source).body if isinstance(node, ast.ImportFrom))


def ceilings() -> dict[str, int]:
    """Return the ceiling of each number."""
    return tomllib.loads(CEILINGS.read_text())


def lower(now: dict[str, int], limits: dict[str, int]) -> None:
    """Write the ceilings: each number where it is below its ceiling or has none. A ceiling is raised by hand."""
    lowered = {words: min(number, limits.get(words, number)) for words, number in now.items()}
    CEILINGS.write_text("".join(f'"{words}" = {number}\n' for words, number in lowered.items()))


def measure_commit(commit: str) -> dict[str, int]:
    """Return the numbers of the house at a commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return measure(Path(folder))


def _base() -> str:
    """Return the last tag, or main where there is none."""
    tag = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, text=True)
    return tag.stdout.strip() or "main"


def main() -> int:
    """Print each number, its ceiling and its difference to a base."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=_base(), help="commit to compare with (default: the last tag, else main)")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the numbers")
    arguments = parser.parse_args()
    base, before, now, limits = arguments.base, measure_commit(arguments.base), measure(), ceilings()
    if arguments.lower:
        lower(now, limits)
    print(f"   now  ceiling  since {base[:12]}")
    for words, number in now.items():
        print(f"{number:6} {limits.get(words, '-'):>8} {number - before.get(words, 0):+7}  {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
