"""Messages between ranks. Parameters and gradients travel by these only.

In: a contiguous 1-D tensor, a peer and a tag. Out: the same tensor there, or a `CommError` that names both ranks.
`select.py` chooses the transport for a device and a process group. Read `base.py` first.
"""
