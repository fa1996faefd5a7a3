"""Applications of the library: the command line, the demo, `verify`, the adapter for FSDP2.

In: the public API. Out: programs to run; no room imports from here. Read `cli.py` first: it lists the commands.
What each does, and its options, stand in the room of its subject, in `command.py`; those of checkpoints stand in
`checkpoint_commands.py`, because entering their room imports PyTorch.
"""
