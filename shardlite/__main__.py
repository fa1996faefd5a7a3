"""Run the command line as `python -m shardlite`."""

import sys

from shardlite.cli import main

if __name__ == "__main__":
    sys.exit(main())
