"""Train by ShardLite and by reference methods side by side, and compare.

In: functions that make a model and a batch, and the options of the training. Out: a report that names the first tensor
that differs. Read `verify.py` first, then `twins.py`. `command.py` is `shardlite verify`.
"""
