"""`shardlite plan`: predict memory, traffic and step time of a training run.

In: a model (a preset, a Hugging Face config, an import path), options of the run, and a named cluster. Out: a table,
JSON and plots. Read `run.py` first, then `plan.py`.

    command.py    the options                        run.py       from the options to the output
    source.py     the model and its batch            trace.py     activations and operations of a step, as events
    presets.py    shapes of models by name           decoder.py   the modules of the presets
    cards.py      cards by name, with sources        clusters.py  links by name, with sources
    plan.py       bytes of a rank, for one setting   simulate.py  step time, from events and the cost model
    published.py  published formulas                 report.py    text and JSON
                                                     plots.py     plots of memory, scaling and bandwidth
"""
