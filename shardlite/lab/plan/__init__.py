"""`shardlite plan`: print the predictions of `shardlite.plan` for a training run.

In: a model (a preset, a Hugging Face config, an import path), options of the run, and a named cluster. Out: a table,
JSON and plots. Read `run.py` first, then `report.py`.

    command.py    the options                 run.py      turns the options into the output
    source.py     finds a model by its name   report.py   text and JSON
    presets.py    shapes of models by name    plots.py    plots of memory, scaling and bandwidth
"""
