"""Kernels: times beside PyTorch's operators and other packages, and what compilers make of them.

`python -m bench.kernels` measures (`run.py`), `shardlite report` shows the rows,
`python -m bench.kernels.aot` compiles every kernel for GPUs that need not be here.
"""
