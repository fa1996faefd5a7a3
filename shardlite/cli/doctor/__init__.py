"""`shardlite doctor`: properties of this machine, and the transports that are available on it.

In: a number of ranks. Out: text that explains which transport is selected, and an exit status. Read `trials.py` first;
`command.py` starts the ranks.
"""
