"""`python -m bench.kernels`."""

import sys

from bench.kernels.run import main

sys.exit(main(sys.argv[1:]))
