"""`shardlite ring`: show step by step how a collective moves the segments of a buffer between ranks.

In: a schedule of `shardlite.comm`. Out: a page of text. Read `picture.py` first.
"""
