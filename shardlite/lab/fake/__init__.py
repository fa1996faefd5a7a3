"""Ranks and GPUs that a machine lacks.

In: programs that use a process group or CUDA. Out: a process group whose other ranks are fake, and a simulated CUDA
that records streams and events. Read `fake_group.py` first.
"""
