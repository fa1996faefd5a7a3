"""The command line: `shardlite COMMAND`.

In: the words of a command line. Out: the command that they name, started on ranks if it needs ranks. Read `commands.py`
first. `options.json` describes all commands and their options. Commands for checkpoints and `doctor` are in this room,
the commands that train, plan and measure in the laboratory (`shardlite.lab`).
"""

from shardlite.cli import launch
from shardlite.cli.commands import main
from shardlite.cli.launch import (
    environment_for,
    on_signals,
    process_group,
    run_agent,
    torchrun,
    usable_cores,
    world_size,
)
from shardlite.cli.options import (
    MOST_RANKS,
    add_options,
    check_file,
    check_folder,
    check_numbers,
    imported,
    precision_of,
    progress,
    started_ranks,
    usage_errors,
)
