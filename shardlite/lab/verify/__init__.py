"""Train a model with ShardLite and with reference methods, and compare the results.

In: functions that make a model and a batch, and the options of the training. Out: a report that names the first tensor
that differs. Read `verify.py` first, then `twins.py`. `command.py` runs `shardlite verify`.
"""
