"""Benchmarks of kernels: their times, compared with PyTorch's operators, and their machine code.

`python -m bench.kernels` measures times (`run.py`).
`python -m bench.kernels.aot` compiles every kernel for GPUs, and needs no GPU.
"""
