"""Streams without a GPU: each is what has happened before the next thing it is given; waiting adds another's past."""

from contextlib import contextmanager

import pytest
import torch

CPU = torch.device("cpu")


class Event:
    """What had happened on a stream where it was recorded last."""

    def __init__(self) -> None:
        self.past: set = set()
        self.records = 0

    def record(self, stream) -> None:
        self.past, self.records = set(stream.past), self.records + 1


class Stream:
    """A stream."""

    def __init__(self, device=CPU) -> None:
        self.device, self.past, self.waits = device, set(), 0

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, other) -> None:
        self.waits, self.past = self.waits + 1, self.past | other.past

    def wait_event(self, event) -> None:
        self.waits, self.past = self.waits + 1, self.past | event.past


class Device:
    """Streams of a device, of which one is current."""

    def __init__(self) -> None:
        self.current = Stream()

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def fake_streams():
    """Yield a device whose streams are PyTorch's inside."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda *unused: device.current)
        patch.setattr(torch.cuda, "stream", device.on)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        yield device
