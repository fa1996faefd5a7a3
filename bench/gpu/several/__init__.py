"""Probes on several GPUs of one host: `python -m bench.gpu --ranks 8`. See `docs/gpu.md`.

Read `launch.py` first: it starts a process per rank. Each rank calls `run(report, group)` of `links.py`, `steps.py` or
`pause.py`, and rank 0 writes the rows. `bench/gpu/results.py` shows them.
"""
