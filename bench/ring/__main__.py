"""`python -m bench.ring`."""

import sys

from bench.ring.run import main

sys.exit(main(sys.argv[1:]))
