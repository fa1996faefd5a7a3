"""Checkpoints of a run: saved and loaded in shards, by any number of ranks, at any stage and in any format.

In: a wrapped model, its optimizer, and what the program adds. Out: a folder in the format of
`torch.distributed.checkpoint`, published by one rename, with checksums; and the run as it was. Read `saving.py` first.
`../checkpoint_commands.py` has the options of `shardlite inspect`, `export` and `import`.

    checkpoints/                    the folder of a run: the `path` of `save` and `load`
      step-00000100/                one checkpoint
        __0_0.distcp, __1_0.distcp  what each rank holds, written by that rank
        .metadata                   where each tensor's parts lie, as DCP writes and reads it
        shardlite.json              the step, the number of ranks, and checksums of all other files
      .saving-step-00000200/        one that is being written, or was when the run died
"""

from shardlite.apps.checkpoint.distributed_state_dict import teach
from shardlite.apps.checkpoint.files import latest
from shardlite.apps.checkpoint.loading import load
from shardlite.apps.checkpoint.neighbour import save_in_memory
from shardlite.apps.checkpoint.reading import SafeLoadPlanner, SafeReader
from shardlite.apps.checkpoint.saving import async_save, save

teach()
