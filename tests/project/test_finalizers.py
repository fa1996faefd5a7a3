"""Everything that runs when an object is collected, when a process is forked, and when the program ends.

The garbage collector runs on any thread and inside any code, so also while its thread holds locks of Python, of the
program and of this library. What it calls must neither wait nor communicate: another thread may need one of these locks
before it can do what is waited for. The tables say what each function does instead.
"""

import ast
from collections.abc import Iterator

from tests.support.ranks.scripts import ROOT

COLLECTED = {
    "shardlite/plan/trace.py: __del__": "counts, and adds to a list of the planning thread",
    "shardlite/checkpoint/in_memory/snapshot.py: os.close": "closes a file of memory",
    "shardlite/checkpoint/in_memory/holder.py: os.close": "closes the file of a process",
    "shardlite/comm/control/store.py: end": "a message to a thread; `SimpleQueue.put` takes no lock",
    "shardlite/comm/transport/shared_memory/heap.py: os.close": "closes a file of memory",
    "shardlite/comm/transport/shared_memory/heap.py: self._reclaim": "frees pages, and appends to a deque",
    "shardlite/comm/transport/shared_memory/rendezvous.py: _close": "closes files of memory",
    "shardlite/comm/streams.py: __del__": "appends to a list",
    "shardlite/comm/streams.py: program.wait_outside_captures": "a stream waits, and no thread; not if it is captured",
    "shardlite/comm/streams.py: self._queue.put": "a message to a thread; `SimpleQueue.put` takes no lock",
    "shardlite/comm/transport/nccl.py: setattr": "sets a flag",
    "shardlite/model.py: _trim": "frees pages, unless another thread holds the lock, which then does it",
    "shardlite/params/host_states.py: _retire": "appends to a deque; unpins what no stream uses, and queries events",
    "shardlite/telemetry/ledger.py: self._dead.append": "appends to a deque",
    "shardlite/weights/saved_tensors.py: __del__": "counts; only autograd's thread reshards, others append to a list",
}
"""What is called when an object is collected, and what it does."""

AT_EXIT = {
    "shardlite/checkpoint/lease.py: _give_up_all": "gives up leases",
    "shardlite/comm/control/threads.py: end_threads": "joins threads, but for those of queues; gloo's threads rest",
    "shardlite/comm/streams.py: end_queues": "joins the threads of queues",
    "shardlite/comm/transport/nccl.py: _close": "shuts communicators down",
}
"""What is called when the program ends. It may wait."""

AFTER_FORK = {
    "shardlite/checkpoint/lease.py: _after_fork": "closes files, and makes new locks",
    "shardlite/comm/streams.py: _after_fork": "forgets threads of the parent",
    "shardlite/comm/transport/gloo.py: _waiter.forget": "forgets a thread of the parent",
}
"""What is called in the child of a fork."""

FINALIZE = {"weakref.finalize", "finalize"}

_CONTAINERS = {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "WeakMethod"}
"""They have callbacks of Python's own, which take no lock."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted([*(ROOT / "shardlite").rglob("*.py"), *(ROOT / "kernels/shardlite_kernels").rglob("*.py")]):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def name_of(call: ast.Call) -> str:
    """Return the last word of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def kinds_of_references(tree: ast.Module) -> set[str]:
    """Return the names by which a file makes finalizers and weak references, its own subclasses included."""
    classes = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    own = {each.name for each in classes if any("weakref.ref" in ast.unparse(base) for base in each.bases)}
    return {"finalize", "Finalize", "ref", "WeakMethod", "proxy"} | own


def collected(tree: ast.Module) -> Iterator[str]:
    """Yield what a file calls when an object is collected."""
    kinds = kinds_of_references(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node.name
        elif isinstance(node, ast.Call) and name_of(node) in kinds and len(node.args) > 1:
            yield ast.unparse(node.args[1])


def registered(tree: ast.Module, function: str) -> Iterator[str]:
    """Yield what a file registers by `function`, at exit or at a fork."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            yield from (ast.unparse(each) for each in (*node.args, *(keyword.value for keyword in node.keywords)))


def test_the_tables_name_all_finalizers():
    found = {f"{file}: {what}" for file, tree in sources() for what in collected(tree)}
    assert found == COLLECTED.keys()


def test_the_tables_name_everything_at_exit_and_after_a_fork():
    for function, table in {"atexit.register": AT_EXIT, "os.register_at_fork": AFTER_FORK}.items():
        assert {f"{file}: {what}" for file, tree in sources() for what in registered(tree, function)} == table.keys()


def test_no_finalizer_runs_at_exit():
    """Python would call it in an order that is hard to see. What must be done then stands in `AT_EXIT`."""
    for file, tree in sources():
        made = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) in FINALIZE]
        off = [
            target.value
            for each in ast.walk(tree)
            if isinstance(each, ast.Assign) and ast.unparse(each.value) == "False"
            for target in each.targets
            if isinstance(target, ast.Attribute) and target.attr == "atexit"
        ]
        assert [ast.unparse(each) for each in made if each not in off] == [], file


def test_weak_references_are_made_in_ways_that_these_tests_know():
    known = {"ref", "finalize", "proxy", "ReferenceType", *_CONTAINERS}
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "weakref":
                assert {each.name for each in node.names} <= known, file
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "weakref":
                assert node.attr in known, file
