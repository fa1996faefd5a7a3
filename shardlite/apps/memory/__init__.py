"""`shardlite memory`: live tensor bytes of one training step by purpose, predicted and measured.

In: a model as for `shardlite plan`, and options of the run. Out: a table, and a picture of the step beside FSDP2's.
Read `run.py` first.

    command.py   the options                          run.py       what each rank does
    plots.py     the picture                          recorder.py  bytes at every operator of a step
    systems.py   ShardLite and FSDP2, ready to train  report.py    the table
"""
