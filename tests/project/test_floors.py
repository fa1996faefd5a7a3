"""Imports go down: each module imports only from lower floors."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "shardlite"

# From the ground up. Rooms of one floor know nothing of each other; a file may import those that stand before it.
FLOORS = [
    ["errors", "config", "patches", "telemetry"],
    ["comm"],
    ["params"],
    ["weights", "grads", "optim"],
    ["full", "wrapping"],
    ["engine"],
    ["plan", "optimizers", "model", "extend", "ema"],
    ["checkpoint"],
    ["integrations", "cli"],
    ["lab"],
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
PLACE = {name: place for names in FLOORS for place, name in enumerate(names)}
ENTRANCES = {"__init__", "__main__"}  # may import every room; no room imports them


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the dotted name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sources(HOUSE)}


def imported(path: Path, *, late: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the modules that a file imports and the names that it takes from them, those inside functions if `late`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


def ours(path: Path, *, late: bool = True) -> Iterator[str]:
    """Yield the modules of the library that a file imports."""
    for module, name in imported(path, late=late):
        if module.split(".")[0] == "shardlite":
            yield f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def room_of(module: str) -> str:
    """Return the room that a module lies in, or its own name if it is a file beside the rooms."""
    return [*module.split("."), "__init__"][1]


def is_room(name: str) -> bool:
    return (HOUSE / name).is_dir()


def test_there_are_at_most_ten_floors_and_every_file_is_on_one():
    assert len(FLOORS) <= 10
    entries = {room_of(module) for module in MODULES} - ENTRANCES
    assert entries == set(HEIGHT)
    assert len(entries) <= 21  # and __main__


@pytest.mark.parametrize("path", sources(HOUSE), ids=name_of)
def test_imports_go_down(path):
    own = room_of(name_of(path))
    if own in ENTRANCES:
        return
    allowed = {"__init__"} if own in ("lab", "cli", "integrations") else set()  # they use it as any program does
    for other in set(map(room_of, ours(path))) - allowed:
        rooms = is_room(own) and is_room(other)
        beside = HEIGHT[other] == HEIGHT[own] and PLACE[other] < PLACE[own] and not rooms
        assert other == own or HEIGHT[other] < HEIGHT[own] or beside, f"{own} imports {other}, which is not below it"


def named_in_strings(path: Path) -> Iterator[str]:
    """Yield the modules of the library that the strings of a file name, as `import_module` takes them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
            yield node.value


def test_no_string_names_a_module_of_a_higher_floor():
    upward = {
        (name, other)
        for name, path in MODULES.items()
        for other in map(room_of, named_in_strings(path))
        if room_of(name) not in ENTRANCES and other in HEIGHT and HEIGHT[other] > HEIGHT[room_of(name)]
    }
    assert not upward


def from_other_rooms(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield what a file takes from other rooms: the room, the module, and the name."""
    for module, name in imported(path):
        room = room_of(module)
        if module.startswith("shardlite.") and room != room_of(name_of(path)) and is_room(room) and room != "lab":
            yield room, module, name


def test_a_room_is_entered_by_its_door():
    """What a room offers to several files is what its `__init__` names. A single file takes a name from its owner."""
    takers = {(path, *taken) for path in MODULES.values() for taken in from_other_rooms(path)}
    users = Counter(tuple(taken) for _, *taken in takers)
    for path, room, module, name in takers:
        if module == f"shardlite.{room}":
            assert name in {each for _, each in imported(MODULES[module])}, f"{room} does not offer {name}"
        else:
            assert users[room, module, name] == 1, f"{name_of(path)} imports {name} from {module}, as other files do"


def test_every_room_says_what_comes_in_and_what_goes_out_and_where_to_begin():
    for name, path in MODULES.items():
        if path.name == "__init__.py" and path.parent != HOUSE:
            told = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert "In: " in told, name
            assert "Out: " in told, name
            assert "first" in told, name


def test_no_imports_go_in_a_circle():
    """An `__init__` may import the files of its room, which import each other by their own names."""
    imports = {name: set(ours(path)) - {name} for name, path in MODULES.items()}
    assert set(TopologicalSorter(imports).static_order()) >= set(MODULES)  # a circle has no order: it raises


def test_rooms_are_small():
    for folder in {path.parent for path in MODULES.values()} - {HOUSE}:
        files = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        assert len([path for path in files if path.stem not in ENTRANCES]) <= 16, folder


def test_kernels_import_only_torch_and_triton():
    for path in sources(ROOT / "kernels"):
        foreign = {module.split(".")[0] for module, _ in imported(path)} & {"shardlite", "numpy", "einops", "tests"}
        assert not foreign, f"{path} imports {foreign}"


def test_only_the_transports_and_the_edges_know_process_groups():
    """Parameters and gradients travel by our rings; others may use `torch.distributed` to agree on plain facts.

    What `torch.distributed.checkpoint` calls the parts of a tensor in a file is no communication.
    """

    def communicates(module: str) -> bool:
        return "torch.distributed" in module and not module.startswith("torch.distributed.checkpoint")

    users = {room_of(name) for name, path in MODULES.items() if any(communicates(m) for m, _ in imported(path))}
    assert users <= {"comm", "cli", "lab"}


def test_collectives_of_torch_move_tensors_in_one_module_of_the_library():
    words = (
        *("all_gather_into_tensor", "reduce_scatter_tensor", "dist.all_reduce", "dist.broadcast(", "dist.all_gather("),
        *("_allgather_base", "_reduce_scatter_base", "alltoall", ".allreduce(", "_group.broadcast("),
    )
    assert any(word in MODULES["shardlite.comm.transport.group_collectives"].read_text() for word in words)
    others = ("shardlite.lab", "shardlite.cli.doctor", "shardlite.comm.transport.group_collectives")
    for name, path in MODULES.items():
        if not name.startswith(others):
            assert not [word for word in words if word in path.read_text()], path
