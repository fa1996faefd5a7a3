"""The site is built without a warning, and a browser shows it: titles, style sheets, pictures and all public names."""

import importlib.util
import json
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest

import shardlite
from tests.support.browser import browse, needs_browser
from tests.support.markdown import ROOT
from tests.support.patience import seconds

MISSING = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
TITLES = {"how-it-works": "How it works", "limits": "Limits", "api": "API reference"}
PROBE = """
<script>
const failed = [];
addEventListener("error", (event) => failed.push(event.target.href || event.target.src || event.message), true);
addEventListener("load", () => document.documentElement.setAttribute("data-seen", JSON.stringify({
  title: document.title,
  broken: [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src),
  images: document.images.length,
  failed,
  sheets: document.styleSheets.length,
  overflow: document.documentElement.scrollWidth - innerWidth,
  wide: [...document.querySelectorAll(".table-wrapper")].filter((t) => t.scrollWidth > t.clientWidth).length,
  code: [...document.querySelectorAll("article .highlight")].map((block) => block.innerText.trim().length),
  ids: [...document.querySelectorAll("dt[id]")].map((name) => name.id),
})));
</script>
"""
"""What the browser has found is written into the page, which it then prints."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} is not installed: pip install '.[docs]'"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    strict = ("--fail-on-warning", "--keep-going", "--nitpicky", "--quiet")
    command = [sys.executable, "-m", "sphinx", *strict, "-d", str(folder / "cache"), ROOT / "docs", folder / "html"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=seconds(300), check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "html"


def seen(page: Path) -> dict[str, Any]:
    """Return what the browser finds on a page once it is loaded."""
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(page.read_text().replace("<head>", f"<head>{PROBE}", 1))
    found = re.search(r'data-seen="([^"]*)"', browse(probed, "--dump-dom"))
    assert found is not None, "the page was not loaded"
    return dict(json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&")))


def test_the_site_has_every_page(site):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists()
    text = (site / "index.html").read_text()
    assert f"ShardLite {escape(shardlite.__version__)}" in text


@needs_browser
@pytest.mark.parametrize("page", TITLES)
def test_a_browser_shows_it(site, page, tmp_path):
    found = seen(site / f"{page}.html")
    assert found["title"].startswith(TITLES[page])
    assert found["broken"] == []
    assert found["images"] >= (page == "how-it-works")
    assert found["failed"] == []  # style sheets, scripts, pictures
    assert found["sheets"] >= 3  # the theme's, that of code, ours
    assert found["overflow"] <= 0, "something is wider than the window"
    assert found["wide"] == 0, "a table has to be scrolled"
    assert all(found["code"])
    if page == "api":
        assert {f"shardlite.{name}" for name in shardlite.__all__} <= set(found["ids"])
    picture = tmp_path / f"{page}.png"
    browse(site / f"{page}.html", f"--screenshot={picture}")
    assert picture.stat().st_size > 30_000  # an empty page has less
