"""Imports flow one way: a file of the library imports only from floors below its own."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

# From the ground up. A line is a floor, or a storey of one: its files know nothing of each other.
FLOORS = [
    ["errors", "casts"],
    ["schedule", "clock", "process"],
    ["config"],
    ["cost", "layout", "phase", "trace", "order", "agenda", "ledger", "parameters"],
    ["transport"],
    ["agree", "walk", "traffic", "magnitude"],
    ["cut"],
    ["ring"],
    ["arena", "lane", "progress"],
    ["unit", "shared"],
    ["wire", "handed"],
    ["writeback", "watch"],
    ["fill", "talks", "bucket", "average", "clip"],
    ["passes"],
    ["join", "gather", "unsharded", "census", "shards", "skips"],
    ["reduce", "buffers"],
    ["partition", "handles"],
    ["backward", "sites", "stepping", "checks", "aliases", "materialise", "state_dicts"],
    ["hooks", "plan", "spread"],
    ["counts"],
    ["slots"],
    ["runs", "options"],
    ["hops", "stepplan"],
    ["optim", "build", "full", "guard"],
    ["inside"],
    ["homes"],
    ["wrapper"],
    ["ema", "memory", "verification", "fsdp2"],
    ["launch", "picture"],
    ["doctor"],
    ["painting"],
    ["demo"],
    ["cli"],
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
ENTRANCES = {"__init__", "__main__"}  # may import everything; nothing may import them


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def floor_of(path: Path) -> str:
    return path.relative_to(ROOT / "shardlite").parts[0].removesuffix(".py")


def test_every_file_has_a_floor():
    assert {floor_of(path) for path in sources(ROOT / "shardlite")} - ENTRANCES == set(HEIGHT)


def test_imports_go_down():
    for path in sources(ROOT / "shardlite"):
        own = floor_of(path)
        used = {name.split(".")[1] for name in imported(path) if name.startswith("shardlite.")}
        for other in (used & HEIGHT.keys()) - {own}:
            if own not in ENTRANCES:
                assert HEIGHT[other] < HEIGHT[own], f"{own} imports {other}, which is not below it"


def test_kernels_import_only_torch_and_triton():
    for path in sources(ROOT / "kernels"):
        foreign = {name.split(".")[0] for name in imported(path)} & {"shardlite", "numpy", "einops", "tests"}
        assert not foreign, f"{path} imports {foreign}"


def test_only_the_transport_and_the_edges_know_process_groups():
    """Parameters and gradients travel by our rings; others may use `torch.distributed` to agree on plain facts."""
    allowed = {"transport", "agree", "verification", "demo", "launch", "cli", "fsdp2", "doctor"}
    users = {
        floor_of(path)
        for path in sources(ROOT / "shardlite")
        if any(name.startswith("torch.distributed") for name in imported(path))
    }
    assert users <= allowed


def test_no_collective_of_torch_moves_tensors_in_the_library():
    words = (
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "dist.all_reduce",
        "dist.broadcast(",
        "dist.all_gather(",
    )
    for path in sources(ROOT / "shardlite"):
        if floor_of(path) not in {"verification", "demo"}:
            assert not [word for word in words if word in path.read_text()], path
