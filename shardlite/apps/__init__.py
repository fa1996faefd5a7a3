"""Applications of the library: the command line and its commands.

In: the public API. Out: programs to run; no other room imports this room. Read `cli.py` first. `options.json` describes
the commands and their options. Each command is run by `command.py` in its own room. Commands for checkpoints are in
`checkpoint_commands.py`, because importing the room `checkpoint` imports PyTorch.
"""
