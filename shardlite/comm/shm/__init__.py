"""The transport between processes of one host: messages lie in memory that all of them map.

In: a tensor in this rank's heap, or one that is copied there. Out: the peer reads it where it lies. Ranks meet in
`rendezvous.py` and prove who they are in `handshake.py`. Read `transport.py` first.
"""
