"""Save and load runs in shards. A checkpoint can be loaded at any number of ranks, at any stage and in any format.

In: a wrapped model, its optimizer, and values of the program. Out: for a save, a folder in the format of
`torch.distributed.checkpoint` (DCP), with checksums, which is published by one rename; for a load, the restored run.
Read `saving.py` first.

    checkpoints/                    folder of a run: the `path` of `save` and `load`
      step-00000100/                one checkpoint
        __0_0.distcp, __1_0.distcp  written by each rank
        .metadata                   locations of the parts of each tensor, in DCP's format
        shardlite.json              step, number of ranks, checksums of all other files
      .saving-step-00000200/        a checkpoint that is being written, or that a dead run has left
      .lease                        the job that saves into the folder
"""

from shardlite.checkpoint.files import BLOCK, REMEDY, begin_writeback, check_blocks, checkpoints_in, find, latest
from shardlite.checkpoint.in_memory.copies import save_in_memory
from shardlite.checkpoint.loading import Restored, load
from shardlite.checkpoint.plain_states import full_optimizer_state, load_optimizer_state
from shardlite.checkpoint.reading import Checkpoint, SafeLoadPlanner, SafeReader
from shardlite.checkpoint.safetensors import export_weights, import_weights
from shardlite.checkpoint.saving import async_save, save
from shardlite.checkpoint.state_dict_patches import install
