"""Fixed keys for the library's hooks in the hook tables of every module. PyTorch's own keys count from 0.

`torch.compile` guards on the keys, and would recompile equal blocks if the hooks of these blocks had different keys.
"""

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

UNSHARD, CAST = -1, -2
"""Keys of the hooks that unshard and reshard units, and of those that cast inputs."""


def set_key(module: nn.Module, key: int, handles: Collection[RemovableHandle]) -> None:
    """Give registered hooks of a module a fixed key. The order of hooks stays."""
    numbers = {each.id for each in handles}
    for table in _tables(module):
        before = dict(table)
        table.clear()
        table.update({key if number in numbers else number: hook for number, hook in before.items()})


def remove_hooks(module: nn.Module, key: int) -> None:
    """Remove the hooks of a module that have this key."""
    for table in _tables(module):
        table.pop(key, None)


def _tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return a module's hook tables: two for hooks before its forward, and two for hooks after its forward."""
    before: Any = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    return (*before, module._forward_hooks, module._forward_hooks_always_called)
