"""Bridges to other packages. Importing `shardlite` imports none of them.

In: models and options of another package. Out: the same, on wrapped models. Read the file of your
trainer first; `_wrapping.py` has what all bridges do, and `_accelerator.py` what those of Hugging Face do.
"""
