"""Transports: collectives between ranks. All parameters and gradients are sent through them.

In: a buffer and its cut into segments. Out: the gathered or reduced buffer, or a `CommError` that names the ranks.
`base.py` does this by messages; other files override it, such as `group_collectives.py` with collectives of a process
group. `select.py` selects the transport for a device and a process group. Read `base.py` first.
"""
