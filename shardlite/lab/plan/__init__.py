"""`shardlite plan`: predict memory, traffic and step time of a training run.

In: a model (a preset, a Hugging Face config, an import path), options of the run, and a named cluster. Out: a table,
JSON and plots. Read `run.py` first, then `plan.py`.

    command.py    the options                        run.py       turns the options into the output
    source.py     the model and its batch            trace.py     activations and operations of a step, as events
    presets.py    shapes of models by name           decoder.py   the modules of the presets
    clusters.py   cards and links by name            simulate.py  step time, from events and the cost model
    plan.py       bytes of a rank, for one setting   report.py    text and JSON
    plots.py      plots of memory, scaling and bandwidth
"""
