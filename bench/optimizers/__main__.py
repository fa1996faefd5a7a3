"""`python -m bench.optimizers`."""

import sys

from bench.optimizers.run import main

sys.exit(main(sys.argv[1:]))
