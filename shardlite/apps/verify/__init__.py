"""Training side by side: by ShardLite and by every other way, and what differs.

In: functions that make a model and a batch, and the options of the training. Out: a report that names the first tensor
that differs. Read `verify.py` first, then `twins.py`.
"""
