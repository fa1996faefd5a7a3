"""Transports for tests: every kind of them, and some that delay, count or check what is sent.

`worlds.py` runs one body over each kind of transport. `delegating.py` wraps a transport and counts its messages,
`delays.py` starts them late. `played_symmetric.py` plays symmetric memory on the CPU. `ring_cases.py` has the buffers
and bodies that ring collectives are tried on, and a model of their order.
"""
