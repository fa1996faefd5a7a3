"""What faults cost, and the means against them: saving, restarting, noticing that ranks part, and what FSDP2 does."""
