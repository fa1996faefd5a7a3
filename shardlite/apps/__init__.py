"""Uses of the library: the command line, the demo, `verify`, the adapter for FSDP2.

In: what the library offers to everybody. Out: programs to run; no room imports from here. Read `cli.py` first.
"""
