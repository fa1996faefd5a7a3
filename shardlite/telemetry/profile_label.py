"""Labels in the traces of `torch.profiler`. A label names the unit that is computed, gathered, reduced or awaited."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.autograd import profiler

_NO_LABEL = nullcontext()


def profile_label(action: str, unit: str) -> AbstractContextManager[object]:
    """Return a context with the profile label `shardlite::ACTION UNIT`, or an empty context if no profiler is on."""
    if not profiler._is_profiler_enabled:
        return _NO_LABEL
    return profiler.record_function(f"shardlite::{action} {unit}")


def labelled(block: AbstractContextManager[object], action: str, unit: str) -> AbstractContextManager[object]:
    """Return the context `block`. If a profiler is on, return a context that enters a label and then `block`."""
    if not profiler._is_profiler_enabled:
        return block
    return _both(profile_label(action, unit), block)


@contextmanager
def _both(label: AbstractContextManager[object], block: AbstractContextManager[object]) -> Iterator[None]:
    with label, block:
        yield
