"""These tests need `TRITON_INTERPRET=1` before Triton is imported: `../test_interpreter.py` runs them in a process."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
