"""Uses of the library: the command line, the demo, `verify`, the adapter for FSDP2.

In: what the library offers to everybody. Nothing imports from here. Read `cli.py` first.
"""
