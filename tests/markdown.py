"""Reading the documentation: its blocks of code, which are run, its links, and the tests that it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


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


def run_on_two_ranks(code: str, folder: Path, *, warnings: str = "error") -> None:
    """Run a script, without CUDA and with these warnings, on two ranks."""
    script = folder / "train.py"
    script.write_text(code)
    path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": warnings}
    launcher = [sys.executable, "-W", "default", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
