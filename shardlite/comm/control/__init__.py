"""Control messages between ranks, through the store of the process group.

In: numbers and words. Out: the same on all ranks, or an error within the timeout. `failure_reports.py` reports what
other ranks did when something failed, and detects waits that will never end. Read `store.py` first.
"""
