"""Transports: messages between ranks. All parameters and gradients are sent through them.

In: a contiguous 1-D tensor, a peer and a tag. Out: the same tensor at the peer, or a `CommError` that names both ranks.
`select.py` selects the transport for a device and a process group. Read `base.py` first.
"""
