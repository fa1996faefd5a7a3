"""`shardlite train`: a small GPT trained on text over several ranks, as an example and a measurement of the library.

In: a text and the settings of the run. Out: losses, memory and speed, printed, plotted and logged. Read `train.py`
first; `command.py` has the options, `config_file.py` reads them from a file, `log.py` writes the values of each step.
"""
