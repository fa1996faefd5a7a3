"""`shardlite ring`: how the segments of a buffer go round the ranks in a collective, step by step.

In: a schedule of `shardlite.comm`. Out: a page of text, and an image. Read `picture.py` first.
"""
