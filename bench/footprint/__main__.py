"""`python -m bench.footprint`."""

import sys

from bench.footprint.run import main

sys.exit(main(sys.argv[1:]))
