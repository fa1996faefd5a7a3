"""The transport between processes of one host: messages are stored in memory that all of them map.

In: a tensor in this rank's heap, or one that is copied there. Out: the peer reads it in place. Ranks open each
other's memory in `rendezvous.py`. Read `transport.py` first.
"""
