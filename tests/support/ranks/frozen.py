"""Fast walks over all objects: `gc.collect()` and `gc.get_objects()` take a second where much is imported."""

import gc


def freeze() -> None:
    """Keep the garbage collector from all objects that are there. A `Meter` does not see their tensors from now on."""
    gc.collect()
    gc.freeze()
