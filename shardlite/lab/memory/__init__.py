"""`shardlite memory`: measure and predict the memory of a training step in ShardLite and in other systems.

In: a model (named as for `shardlite plan`), systems, and numbers of ranks. Out: a row per system and number of ranks,
tables and plots, and the bytes of one step by purpose. Read `run.py` first, then `measure.py`.

    command.py    the options                       run.py      starts the ranks of each system
    measure.py    measures one system on a rank     systems.py  the systems, built from one model
    pss.py        samples the size of processes     predict.py  the same bytes by arithmetic
    timeline.py   bytes at every operator           table.py    rows and steps as tables
    peak.py       the peak of one step              plots.py    rows and steps as plots
    machine.py    where and when a row was measured
"""

OWN = "shardlite"
"""The name of the system that is ShardLite with the options of the command line."""
