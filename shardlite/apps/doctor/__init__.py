"""`shardlite doctor`: what this machine offers, which way messages take here, and why.

In: a number of ranks. Out: text, and an exit status. Read `trials.py` first; `command.py` has the options.
"""
