"""The public names and their signatures are those of `public_names.txt`: a change of them is a change of that file."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import shardlite
from shardlite import extend

FROZEN = Path(__file__).with_name("public_names.txt")


def signatures() -> Iterator[str]:
    """Yield each public name of the package, and each public member of its classes, with its parameters."""
    yield from signatures_in(shardlite)
    yield from (f"extend.{line}" for line in signatures_in(extend))


def signatures_in(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if getattr(thing, "__module__", "").startswith(("shardlite.params", "types")):
            yield name  # a type of arguments
            continue
        if not inspect.isclass(thing):
            yield f"{name}{parameters(thing)}" if callable(thing) else name
            continue
        yield name if issubclass(thing, BaseException) else f"{name}{parameters(thing)}"
        for key, member in sorted(vars(thing).items()):
            if key.startswith("_") or not hasattr(thing, key):
                continue
            called = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            yield f"{name}.{key}" + (parameters(called) if inspect.isfunction(called) else "")


def parameters(function: object) -> str:
    """Return the names of the parameters, with `*` where they must be named and `=` where they have a default."""
    words = []
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(f"{stars}{each.name}" + "=" * (each.default is not each.empty))
    return f"({', '.join(word for word in words if word != 'self')})"


def test_public_names_and_signatures_are_the_frozen_ones():
    """After a change that was decided, write them anew: `python -m tests.project.test_public_names`."""
    assert list(signatures()) == FROZEN.read_text().splitlines()


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in signatures()))
