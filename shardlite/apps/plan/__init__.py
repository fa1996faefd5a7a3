"""`shardlite plan`: predict memory, traffic and step time of a training run.

In: a model (a preset, a Hugging Face config, an import path), options of the run, and a named cluster. Out: a table,
JSON and plots. Read `run.py` first, then `plan.py`.

    command.py    the options                            run.py      from them to the output
    source.py     the model, with fake tensors           trace.py    its activations and work, as events
    presets.py    shapes of models by name               decoder.py  their modules
    cards.py      cards by name, with sources            clusters.py links by name, with sources
    plan.py       bytes of a rank, for one setting       simulate.py step time, from events and the cost model
    published.py  formulas that others have published    report.py, plots.py
"""
