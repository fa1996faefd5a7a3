"""What ranks tell each other beside messages: through the store of the process group, where they found each other.

In: numbers and words. Out: the same on all ranks, or an error within the timeout. `failure_reports.py` says what other
ranks did when something failed, and finds waits that will never end. Read `store.py` first.
"""
