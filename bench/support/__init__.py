"""Code that the benches share: systems and workloads to compare, ranks, timing, memory, and tables of rows."""
