"""Settings of the site: `make docs` builds it, and every warning fails the build.

The API reference is made from docstrings. They are written with Markdown's backticks, so each is translated to
reStructuredText on its way: code stays code, and the names of pages and of public objects become links.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import shardlite  # noqa: E402

project = "ShardLite"
author = "The ShardLite authors"
copyright = "The ShardLite authors, Apache-2.0"
version = release = shardlite.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
nitpick_ignore_regex = [
    ("py:.*", r"(?!shardlite\.).*"),  # names of PyTorch and of Python have no page here
    ("py:class", r"shardlite\.engine\.uneven_inputs\.Batch"),  # whatever the loader yields
    ("py:class", r"shardlite\.optim\.layout\.OptimizerLayout"),  # what the library alone calls returns it
    ("py:class", r"shardlite\.plan\.(planner\.RankPlan|step_time\.StepTime|clusters\.Cluster)"),  # parts of a `Fit`
    ("py:class", r"shardlite\.(params\.flat\.Flat|wrapping\.init\.Values)"),  # described where `extend` uses them
]

autodoc_mock_imports = ["accelerate", "lightning", "safetensors", "transformers"]  # the site is built without them

html_theme = "furo"
html_title = f"ShardLite {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
highlight_language = "text"

COMPLETE = ("ShardLite", "AdamW", "EMA", "Precision", "Route")
"""Public classes of which each public member must be on the site."""

_log = logging.getLogger(__name__)


def public_names() -> list[str]:
    """Return what the API reference must list: public names, and public members of the `COMPLETE` classes."""
    names = [f"shardlite.{name}" for name in shardlite.__all__]
    for owner in COMPLETE:
        members = vars(getattr(shardlite, owner)).items()
        names += [
            f"shardlite.{owner}.{name}"
            for name, member in members
            if not name.startswith("_") and (callable(member) or isinstance(member, property))
        ]
    return names


def _translate(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn Markdown's code, and blocks of code that are only indented, into what reStructuredText means by them."""
    text = "\n".join(lines)
    text = re.sub(r"(?<![`:])`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", _code, text)
    block = re.compile(r"(?<=\n\n)(?=    )(?P<code>(?:    .*\n|\n)+)")
    head, *sections = re.split(r"(?=^(?:Args|Raises|Returns):$)", text, flags=re.MULTILINE)
    head = block.sub(lambda found: f".. code-block:: python\n\n{found['code']}", head + "\n")
    lines[:] = (head + "".join(sections)).split("\n")


def _code(found: re.Match[str]) -> str:
    """Translate the text between backticks."""
    content = " ".join(found[1].split())
    if page := re.fullmatch(r"docs/([\w-]+)\.md", content):
        return f":doc:`{page[1]}`"
    if content in shardlite.__all__ or content.removeprefix("shardlite.") in shardlite.__all__:
        return f":py:obj:`{content}`"
    return f"``{content}``"


def _resolve(app: Sphinx, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """Lead a name to where it is public, wherever it is defined and however it is written."""
    target = f"shardlite.{node.get('reftarget', '').rpartition('.')[2]}"
    if node.get("refdomain") != "py" or target not in env.domains["py"].objects:
        return None
    page = env.domains["py"].objects[target].docname
    link = nodes.reference(
        "", "", content, internal=True, refuri=app.builder.get_relative_uri(node["refdoc"], page) + f"#{target}"
    )
    return link


def _let_long_names_break(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let long names break behind a slash, a colon, a dot or an underscore, which fits them into a narrow column."""
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext()
        if app.builder.format == "html" and len(text) > 20:
            literal.clear()
            for part in re.findall(r"[^/:._]*(?:/|::?|[._]+|$)", text):
                literal += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]


def _check_complete(app: Sphinx, env: Any) -> None:
    """Warn, and so fail, if a public name is not on the site or has no docstring."""
    listed = env.domains["py"].objects
    for name in public_names():
        if name not in listed:
            _log.warning("%s is public and not in the API reference, or has no docstring", name)
    for name in shardlite.__all__:
        if not inspect.getdoc(getattr(shardlite, name)):
            _log.warning("shardlite.%s has no docstring", name)


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("autodoc-process-docstring", _translate, priority=400)  # before napoleon, which reads sections
    app.connect("missing-reference", _resolve)
    app.connect("doctree-resolved", _let_long_names_break)
    app.connect("env-check-consistency", _check_complete)
