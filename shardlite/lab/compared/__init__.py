"""What the laboratory compares: the same work in ShardLite, DDP, FSDP2 and others.

In: the name of a system, the name of a workload, and a setting. Out: a trainer that steps the workload in the system,
after a check that all systems give the same result. Read `workloads.py` first, then `systems.py`.
"""
