"""`python -m bench.gpu`."""

import sys

from bench.gpu.run import main

if __name__ == "__main__":  # processes that compile kernels import this file again
    sys.exit(main(sys.argv[1:]))
