"""The laboratory: programs that train, verify, plan and measure, and what benches are made of.

In: the public API, and models. Out: commands of `shardlite`, rows and tables. No other room imports this room; only the
public name `shardlite.verify` leads here. Read `train/train.py` first. Each command has a room of its own inside this
room, and the `command.py` of that room runs the command. One file each has systems, workloads, ranks, launches, times,
tables and plots.
"""
