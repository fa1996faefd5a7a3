"""`shardlite train`: train a small GPT on text over several ranks, as an example and a measurement of the library.

In: a text and the settings of the run. Out: printed, plotted and logged losses, memory and speed. Read `train.py`
first. `command.py` reads the settings from the command line and a file. `log.py` writes the values of each step.
"""
