"""`shardlite footprint`: the memory of a training step in ShardLite and in other systems, measured beside predicted.

In: a model, as `shardlite plan` takes it, systems, and numbers of ranks. Out: a row for each, a table and plots. Read
`command.py` first, then `run.py`.

    systems.py    what is compared, built from one model      predict.py  the bytes of a step, by arithmetic
    run.py        starts the ranks of each system             peers.py    the rules of PyTorch's systems for that
    measure.py    what each rank does                         table.py    rows as a table
    sampler.py    what processes and tensors hold             plots.py    rows as plots
    pss.py        a program that reads it from outside        machine.py  where and when a row was measured
"""
