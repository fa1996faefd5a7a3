"""`shardlite memory`: measure and predict the memory of a training step in ShardLite and in other systems.

In: a model (named as for `shardlite plan`), systems, and numbers of ranks. Out: a row per system and number of ranks,
tables and plots, and the bytes of one step by purpose. Read `run.py` first, then `recorder.py`.

    command.py    the options                       run.py      starts the ranks of each system
    recorder.py   measures one system on a rank     predict.py  the same bytes by arithmetic
    pss.py        samples the size of processes     text.py     rows and steps as tables
    timeline.py   bytes at every operator           plots.py    rows and steps as plots
    peak.py       the peak of one step              machine.py  where and when a row was measured
"""

OWN = "shardlite"
"""The name of the system that is ShardLite with the options of the command line."""
