"""Format tables for the terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return rows of cells as text. The first `words` columns are left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
