"""Reading the documentation: its blocks of code, its links, and the tests that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(text: str, language: str) -> list[str]:
    """Return what is between fences of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    """Return what inline links lead to, without the place in it; links to a place in the same file are left out."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)


def assert_links_lead_somewhere(path: Path) -> None:
    """Check those that lead to a file."""
    for target in links(path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"
