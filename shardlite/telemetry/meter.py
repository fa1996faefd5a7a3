"""Measure tensor memory: the bytes in all tensor storages on this rank, now and at the peak.

`Meter` intercepts each operator that PyTorch dispatches in forward, backward and optimizer. It tracks the storages of
the operator's arguments and results in a `Ledger`, which detects that a storage is freed. So a count is exact on any
device and at any size, and does not depend on the machine's load. The count includes the memory that the program
requested. It excludes allocator rounding, fragmentation, Python's own memory, and the memory that a kernel allocates
and frees itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from shardlite.errors import LayoutError
from shardlite.telemetry.ledger import Ledger

T = TypeVar("T")

_TENSORS = "tensors"  # the only purpose in a meter's own ledger


class Meter(TorchDispatchMode, Generic[T]):  # type: ignore[no-untyped-call]
    """Bytes in the tensor storages that are alive while the meter is on.

        with Meter() as meter:
            model(x, y).backward()
        print(meter.peak - meter.live)

    Tensors that exist at entry are found through the garbage collector and count from the start. Two kinds of tensors
    count only from their first use: those that only C++ holds (as in the graph of an earlier forward), and those that
    `gc.freeze()` has hidden from the collector. A meter delays each operator by about ten microseconds, so do not time
    metered steps.

    Args:
        on_peak: function that is called after each new peak. The call comes just before the next operator runs, because
            other ledgers are up to date by then. `at_peak` is the latest result of the function.
        on_operator: function that is called before and after each operator.
    """

    def __init__(
        self, on_peak: Callable[[], T] | None = None, *, on_operator: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_peak = on_peak
        self._on_operator = on_operator
        self._at_peak: T | None = None
        self._snapshot_due = False
        self._ledger = Ledger()
        self._watching = ExitStack()

    @property
    def live(self) -> int:
        """Bytes in the storages that are currently alive."""
        return self._ledger.current().get(_TENSORS, 0)

    @property
    def peak(self) -> int:
        """Maximum bytes since entry or since the last `reset_peak`."""
        return self._ledger.peak().get(_TENSORS, 0)

    @property
    def at_peak(self) -> T | None:
        """The result of `on_peak` at the peak."""
        self._take_snapshot()
        return self._at_peak

    def reset_peak(self) -> None:
        """Reset the peak to the current bytes."""
        self._ledger.reset_peak()
        self._snapshot_due = True

    def __enter__(self) -> Meter[T]:
        with self._noting_peaks():
            for tensor in _existing_tensors():
                self._book(tensor)
        self._watching.enter_context(self._intercepting_resizes())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._watching.close()
        self._take_snapshot()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and track the storages of its arguments and results.

        An operator on a DTensor is skipped: PyTorch runs it again on the tensors that hold the DTensor's memory.
        """
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        self._take_snapshot()
        self._on_operator()
        result = func(*args, **(kwargs or {}))
        with self._noting_peaks():
            for value in tree_leaves((args, kwargs, result)):
                self._book(value)
        self._on_operator()
        return result

    @contextmanager
    def _intercepting_resizes(self) -> Iterator[None]:
        """Intercept `storage.resize_(nbytes)`, because only this method resizes a storage without an operator."""
        original = UntypedStorage.resize_

        def resize(storage: UntypedStorage, nbytes: int) -> Any:
            self._take_snapshot()
            result = original(storage, nbytes)
            with self._noting_peaks():
                self._ledger.track(_TENSORS, storage)
            return result

        setattr(UntypedStorage, "resize_", resize)  # noqa: B010 (mypy refuses the plain assignment)
        try:
            yield
        finally:
            setattr(UntypedStorage, "resize_", original)  # noqa: B010

    def _book(self, value: object) -> None:
        if isinstance(value, Tensor) and _holds_memory(value):
            self._ledger.track(_TENSORS, value)

    @contextmanager
    def _noting_peaks(self) -> Iterator[None]:
        before = self.peak
        yield
        self._snapshot_due |= self.peak > before

    def _take_snapshot(self) -> None:
        if self._snapshot_due and self._on_peak is not None:
            self._at_peak = self._on_peak()
        self._snapshot_due = False


def _holds_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage. Meta tensors, sparse tensors and wrapper subclasses have none."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass_type(type(tensor)):
        return False
    try:
        return tensor.untyped_storage().device.type != "meta"
    except LayoutError:  # a `ShardTensor`
        return False


def _existing_tensors() -> Iterator[Tensor]:
    """Yield all tensors that have a Python object, and their gradients, which may have no Python object."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # for a proxy, `isinstance` would run the property `__class__`
            yield thing
            with suppress(RuntimeError):  # the graph of a view whose base was modified in place cannot be read
                if thing.is_leaf and thing.grad is not None:
                    yield thing.grad
