"""A unit owns its state: transitions follow a table, and no other code writes to it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardlite
from shardlite.params import Unit, Weights
from shardlite.params.unit import Gradients, check_move

HOUSE = Path(shardlite.__file__).parent
MUTATORS = {"add", "append", "clear", "discard", "extend", "pop", "remove", "update"}


def test_phases_move_only_as_the_table_says():
    check_move("u", Weights.SHARDED, Weights.GATHERING)
    with pytest.raises(Exception, match="unit 'u': cannot go from sharded to full; allowed: gathering"):
        check_move("u", Weights.SHARDED, Weights.FULL)
    with pytest.raises(Exception, match="cannot go from reducing to filling"):
        check_move("u", Gradients.REDUCING, Gradients.FILLING)


def written(path: Path) -> Iterator[tuple[int, ast.expr]]:
    """Yield what a file assigns to, deletes or changes in place."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign | ast.Delete):
            yield from ((node.lineno, target) for each in node.targets for target in targets(each))
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.lineno, node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield node.lineno, node.func.value


def targets(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the names, attributes and containers that an assignment to `node` changes."""
    if isinstance(node, ast.Tuple | ast.List):
        for each in node.elts:
            yield from targets(each)
    else:
        yield node.value if isinstance(node, ast.Starred | ast.Subscript) else node


def is_attribute_of_a_unit(target: ast.AST, fields: set[str]) -> bool:
    """Whether this is `unit.x` or `call.unit.x`, or `any.x` of a name that only units have."""
    if not isinstance(target, ast.Attribute) or target.attr not in fields:
        return False
    owner = target.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name == "unit" or (name != "self" and target.attr in ("users", "escapes", "overwritten", "gathered_version"))


def test_only_a_unit_writes_its_attributes():
    fields = {*Unit.__dataclass_fields__, "is_fresh"}
    assert {"phase", "users", "buffer", "work", "bound", "_touched", "_stepped"} <= fields
    found = [
        f"{path.relative_to(HOUSE)}:{line}: {ast.unparse(target)}"
        for path in HOUSE.rglob("*.py")
        if path != HOUSE / "params" / "unit.py"
        for line, target in written(path)
        if is_attribute_of_a_unit(target, fields)
    ]
    assert not found
