"""A small GPT trained on real text over several ranks: an example of the library's use, and a measurement of it.

In: a text and the settings of the run. Out: losses, memory and speed, printed and painted. Read `train.py` first.
"""
