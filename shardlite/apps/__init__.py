"""Applications of the library: the command line and its commands.

In: the public API. Out: programs to run; no other room (package of `shardlite`) imports this room. Read `cli.py` first.
`options.json` describes the commands and their options. The commands for checkpoints are in `checkpoint_commands.py`
and not in the room `shardlite.checkpoint`, because importing that room imports PyTorch. Every other command has a room
of its own inside this room, and the `command.py` of that room runs the command.
"""
