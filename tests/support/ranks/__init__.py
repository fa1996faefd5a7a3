"""Where bodies and programs run: threads, gloo processes, processes that may die, and `torchrun`.

`cluster.py` keeps processes for `Cluster.check(body, world_size, *args)` and runs bodies that see only a transport on
the threads of `local_world.py`. `doomed.py` starts ranks that may die,
`forkserver.py` forks ranks for both. `scripts.py` runs scripts and commands on several ranks.
"""
