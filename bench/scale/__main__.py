"""`python -m bench.scale`."""

import sys

from bench.scale.run import main

sys.exit(main(sys.argv[1:]))
