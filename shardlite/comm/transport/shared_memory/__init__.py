"""The transport between processes of one host. Messages are stored in memory that all of these processes map.

In: a tensor in this rank's heap (its shared memory), or a tensor that is copied to the heap. Out: the tensor, which the
peer reads in place. Ranks open each other's memory in `rendezvous.py`. Read `transport.py` first.
"""
