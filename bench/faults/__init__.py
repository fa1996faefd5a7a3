"""Costs of faults and of the means against them: checkpoints, restarts, detection; and the behaviour of FSDP2."""
