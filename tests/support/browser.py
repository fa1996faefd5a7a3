"""A headless browser, if one is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import seconds

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT = 1280, 1600

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")


def browse(page: Path, *options: str) -> str:
    """Open a page in a headless browser and return what it prints."""
    assert CHROMIUM is not None
    headless = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000")
    command = [CHROMIUM, *headless, f"--window-size={WIDTH},{HEIGHT}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
