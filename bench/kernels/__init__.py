"""Kernels: times beside PyTorch's operators and other packages, and what compilers make of them.

`python -m bench.kernels` measures (`run.py`), `python -m bench.kernels.table` prints the rows,
`python -m bench.kernels.aot` compiles every kernel for GPUs that need not be here.
"""
