"""Count lines of code per room (folder of a package), without blanks, comments and docstrings: `tools/count.py`."""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("shardlite", "kernels/shardlite_kernels")
_BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of lines of `source` that have code."""
    strings: set[int] = set()  # lines of docstrings, including those of attributes
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def rooms(root: Path = ROOT) -> Counter[str]:
    """Return the number of lines of code of each room, and of a package's files outside of rooms."""
    counts: Counter[str] = Counter()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root / package).parts
            counts[f"{package}/{place[0]}" if len(place) > 1 else f"{package}/*.py"] += code_lines(path.read_text())
    return counts


def main() -> int:
    """Print the lines of each room, the largest first, and the sum."""
    counts = rooms()
    for room, lines in counts.most_common():
        print(f"{lines:6} {room}")
    print(f"{counts.total():6} together")
    return 0


if __name__ == "__main__":
    sys.exit(main())
