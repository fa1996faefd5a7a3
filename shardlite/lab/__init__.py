"""The laboratory: programs that train, verify, plan and measure, and the parts that benches share.

In: the public API, and models. Out: commands of `shardlite`, rows and tables. No other room imports this room; only the
public name `shardlite.verify` and the commands in `cli/options.json` lead here. Read `train/train.py` first. Each
command has a room of its own inside this room, and the `command.py` of that room runs the command. `compared/` has the
systems and their work. `fake/` has ranks and GPUs that a machine lacks. Ranks, launches, times, tables and plots have
one file each.
"""
