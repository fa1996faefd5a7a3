"""Integrations with trainers. Importing `shardlite` imports none of them.

In: models and options of another package. Out: the same, on wrapped models. Read the file of your trainer first. All
integrations share `_wrapping.py`, and those of Hugging Face share `_accelerator.py`.
"""
