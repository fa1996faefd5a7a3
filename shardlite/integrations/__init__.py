"""Bridges to other packages. Importing `shardlite` imports none of them.

In: models and options of another package. Out: the same, on wrapped models. Each file stands for itself; read the one
of your trainer first.
"""
