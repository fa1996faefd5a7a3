"""Kernels: times compared with PyTorch's operators, and the code that compilers generate.

`python -m bench.kernels` measures (`run.py`), and `shardlite report` shows the rows. `python -m bench.kernels.aot`
compiles every kernel for GPUs, without a GPU.
"""
