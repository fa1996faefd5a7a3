"""Benchmarks of kernels: their times, compared with PyTorch's operators, and their machine code.

`python -m bench.kernels` measures times (`run.py`), and `shardlite report` shows the rows.
`python -m bench.kernels.aot` compiles every kernel for GPUs, and needs no GPU.
"""
