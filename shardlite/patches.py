"""The list of everything that ShardLite changes in other packages, and the ways to change it.

A room adds its patches to `PATCHES` when it is imported, and `install()` makes the patches of a package when a model is
first wrapped or a trainer is first used. `docs/patches.md` lists the patches for users.

A program may already have imported a function by name, so a patch never rebinds the name of a public function: it
replaces a method of a class, a private function, or what runs inside of a public function. Each replacement is called
with the original function and with the arguments of the call. Objects that are not part of a wrapped model behave as
before.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from threading import Lock
from types import FunctionType, ModuleType
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One change in another package."""

    package: str
    """The package whose first use makes the change: `torch`, `transformers`, `accelerate` or `lightning`."""

    target: str
    """The changed function or class."""

    rests_on: str
    """The private API of the package that the change needs, or `none`."""

    why: str
    """What would happen without the change."""

    apply: Callable[[], object]
    """The function that makes the change."""


PATCHES: list[Patch] = []
"""Everything that ShardLite changes in other packages."""

_lock = Lock()
_made: set[Patch] = set()


def change(
    target: str, *, package: str = "torch", rests_on: str = "none"
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Return a decorator that adds a function to `PATCHES`. The function makes the change. Its docstring is `why`.

    Args:
        target, package, rests_on: fields of `Patch`.
    """

    def add(apply: Callable[[], object]) -> Callable[[], object]:
        PATCHES.append(Patch(package, target, rests_on, _text(apply), apply))
        return apply

    return add


def patch(owner: Any, name: str = "", *, package: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a function that replaces another one, from the next `install(package)` on.

    The decorated function is called with the original function first, and with the arguments of the call. Its docstring
    says what would happen without the patch. `docs/patches.md` quotes the docstring.

    Args:
        owner: a class or a module, or a function that programs import by name.
        name: name of the method of `owner`, or of the function in it. Not needed for a function.
        package: the package that is changed.

    Example:
        >>> @patch(Accelerator, "save_state", package="accelerate")
        ... def _save_state(original, accelerator, *args, **kwargs):
        ...     return original(accelerator, *args, **kwargs)
    """

    def add(replacement: Callable[..., Any]) -> Callable[..., Any]:
        apply = partial(replace_function, owner, name) if name else partial(replace_inside, owner)
        target = ".".join(part for part in (owner.__name__, name) if part)
        PATCHES.append(Patch(package, f"`{target}`", "none", _text(replacement), partial(apply, replacement)))
        return replacement

    return add


def _text(function: Callable[..., object]) -> str:
    return " ".join((function.__doc__ or "").split())


def install(package: str) -> None:
    """Make all changes in a package that are not made yet. Objects that are not wrapped behave as before.

    Args:
        package: `torch`, `transformers`, `accelerate` or `lightning`, or the package of your own patches.
    """
    with _lock:
        for each in PATCHES:
            if each.package == package and each not in _made:
                each.apply()
                _made.add(each)  # last: a change that fails is tried again, and fails again


def replace_function(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of a class, or a private function of a module. Existing objects get the new method too.

    Args:
        owner: the class or the module.
        name: the name of the method or function.
        replacement: called with the original and the arguments of the call.
    """
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, staticmethod(call) if isinstance(vars(owner)[name], staticmethod) else call)


def replace_inside(function: Any, replacement: Callable[..., Any]) -> None:
    """Replace what runs inside of a function, so that programs that have imported it by name get the replacement too.

    Args:
        function: a function, or a wrapper that PyTorch's `_no_grad` or `contextmanager` has made. Such a wrapper keeps
            the inner function in a closure variable, `func`.
        replacement: called with the original and the arguments of the call.
    """
    if "func" in function.__code__.co_freevars:
        cell = function.__closure__[function.__code__.co_freevars.index("func")]
        cell.cell_contents = partial(replacement, cell.cell_contents)
        return
    names, known = function.__globals__, f"_shardlite_{function.__name__}"
    original = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    names[known] = partial(replacement, original)
    function.__wrapped__ = original  # `inspect.signature` follows it
    function.__defaults__ = None
    function.__code__ = _call.__code__.replace(co_names=(known,), co_name=function.__name__)


def _call(*args: Any, **kwargs: Any) -> Any:
    """Code of a replaced function. Its only global name is changed to that of the replacement in the other module."""
    return _replacement(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def after_import(name: str, then: Callable[[], object]) -> None:
    """Call `then` now if a module is imported already, else after the module has been executed."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, AfterImport(name, then))


class AfterImport:
    """Import finder for one module. It calls the function `then` after the module has been executed."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None, /) -> Any:
        """Return the module's spec, with a loader that calls `then`. Return `None` for any other module."""
        if fullname != self._name:
            return None
        from importlib.util import find_spec  # the command line needs no import machinery to answer `--help`

        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        if spec is not None:
            sys.meta_path.insert(0, self)  # this finder stays until the module has been executed without an error
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._then()
        sys.meta_path.remove(self)
