"""Trainers and averages are built on public names only, and one list has everything that the library patches."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import shardlite
from shardlite import extend
from shardlite.patches import PATCHES
from tests.support.markdown import ROOT, cells

HOUSE = ROOT / "shardlite"
TRAINERS = sorted((HOUSE / "integrations").glob("*.py"))
USERS = [*TRAINERS, HOUSE / "ema.py"]
LIBRARY = [path for path in HOUSE.rglob("*.py") if "lab" not in path.relative_to(HOUSE).parts]
PUBLIC = {"shardlite": shardlite.__all__, "shardlite.extend": extend.__all__}
PRIVATE = {  # attributes with an underscore that classes of the library give to their objects
    node.attr
    for path in LIBRARY
    if path not in USERS
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_")
}


def name_of(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", USERS, ids=name_of)
def test_trainers_and_averages_import_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("shardlite"):
            own = str(node.module).startswith("shardlite.integrations") and path in TRAINERS
            if node.module == "shardlite_kernels" or own:
                continue
            if path.stem == "ema" and node.module in ("shardlite.model", "shardlite.errors"):  # it lies below the door
                continue
            assert {each.name for each in node.names} <= set(PUBLIC[str(node.module)]), f"line {node.lineno}"


@pytest.mark.parametrize("path", USERS, ids=name_of)
def test_trainers_and_averages_use_no_private_attribute_of_the_library(path):
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | {"_to_copy", "_buffers"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            assert of_self or node.attr in own or node.attr not in PRIVATE, f"line {node.lineno}: {ast.unparse(node)}"


def test_each_name_of_an_extension_is_described():
    for name in extend.__all__:
        assert getattr(extend, name).__doc__, name
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in extend.__all__ if name not in page and name not in ("Flat", "GroupLike")] == []


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(HOUSE)))
def test_the_library_uses_no_mocks(path):
    assert "unittest" not in path.read_text()  # a change in another package is a `Patch`


@pytest.mark.parametrize("package", ["transformers", "accelerate", "lightning"])
def test_the_page_lists_the_patches_of_trainers(package):
    pytest.importorskip(package, reason=f"needs {package}: `make test-all` installs it")
    import_module(f"shardlite.integrations.{package}")
    section = (ROOT / "docs" / "patches.md").read_text().split(f"## {package.capitalize()}\n")[1].split("\n## ")[0]
    assert cells(section) == [[each.target, each.why] for each in PATCHES if each.package == package]
