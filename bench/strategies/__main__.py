"""`python -m bench.strategies`."""

import sys

from bench.strategies.run import main

sys.exit(main(sys.argv[1:]))
