"""Control messages between ranks, through the store of the process group.

In: numbers and strings. Out: the same values on all ranks, or an error within the timeout. `failure_reports.py` reports
what the other ranks were doing when an operation failed, and detects waits that will never end. Read `store.py` first.
"""
