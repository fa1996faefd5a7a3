"""Telemetry: events, bytes by purpose, durations, live tensors, and labels in profiles.

In: reports of the other packages. Out: the data of `model.trace`, `memory()` and `traffic()`. Read `ledger.py` first.
"""

from shardlite.telemetry.clock import Clock
from shardlite.telemetry.lagged import LaggedNumbers
from shardlite.telemetry.ledger import Held, Ledger, format_bytes, not_on, process_memory
from shardlite.telemetry.meter import Meter
from shardlite.telemetry.profile_label import labelled, profile_label
from shardlite.telemetry.trace import Trace
