"""CUDA's streams and events without a GPU, to the extent that a queue uses them."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Simulated:
    """CUDA's streams and events, to the extent that a queue uses them: `log` has what each stream was given."""

    log: list[tuple[str, str]] = field(default_factory=list)
    current: threading.local = field(default_factory=threading.local)
    streams: int = 0
    events: int = 0

    def stream_of_thread(self, _device):
        return getattr(self.current, "stream", self.compute)

    def __post_init__(self):
        self.compute = SimulatedStream(self, "compute")

    def new_stream(self, _device, priority):
        assert priority < 0, "messages go before computation"
        self.streams += 1
        return SimulatedStream(self, f"side {self.streams}")

    def new_event(self):
        self.events += 1
        return SimulatedEvent(self.events)

    @contextmanager
    def on(self, stream):
        before = self.stream_of_thread(None)
        self.current.stream = stream
        try:
            yield
        finally:
            self.current.stream = before

    def run(self, what):
        """Give the current stream something to do."""
        self.log.append((self.stream_of_thread(None).name, what))


@dataclass
class SimulatedEvent:
    number: int
    recorded: bool = False

    def record(self, stream):
        self.recorded = True
        stream.cuda.log.append((stream.name, f"record {self.number}"))

    def query(self):
        return self.recorded


@dataclass
class SimulatedStream:
    cuda: Simulated
    name: str

    def record_event(self, event=None):
        event = event or self.cuda.new_event()
        event.record(self)
        return event

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        assert event.recorded, "waiting for an event that was not recorded is waiting for nothing"
        self.cuda.log.append((self.name, f"wait {event.number}"))
