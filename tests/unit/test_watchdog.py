"""A rank that waits for another one: what it says, when it ends, and what does not end it."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge_cg_plugin.upstream.parallel import watchdog
from bridge_cg_plugin.upstream.parallel.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[2]
REPLAY = "replay of the forward of vision_encoder"


class Device:
    """Work in the order of its launch; an event is passed once all work before it was done."""

    def __init__(self):
        self.launched = self.done = 0
        self.queries = 0

    def event(self):
        return Event(self)


class Event:
    """A CUDA event: recorded again, it stands for the later point."""

    def __init__(self, device):
        self.device, self.place = device, 0

    def record(self):
        self.device.launched += 1
        self.place = self.device.launched

    def query(self):
        self.device.queries += 1
        return self.device.done >= self.place


class Rank:
    """A watch with a clock and a device of the test's own; its thread is the test, which checks as often."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
        self.now, self.device, self.ended = 0.0, Device(), []
        self.meanwhile = []  # what the training thread does while the watch reads the clock
        self.watch = Watchdog(self.ended.append, self.clock, self.device.event)

    def clock(self):
        if self.meanwhile:
            self.meanwhile.pop()()
        return self.now

    def launch(self):
        self.watch.launched(REPLAY)

    def finish(self):
        self.device.done = self.device.launched

    def check_until(self, now):
        """Let time pass, with the checks of the thread, and check at the end of it."""
        while self.now < now:
            self.now = min(now, self.now + (self.watch.interval_s or 1.0))
            self.watch.check()

    def sleep(self, seconds):
        """Let time pass without a check, as for a process that is stopped."""
        self.now += seconds


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


def test_a_device_that_failed_is_left_to_the_training_thread(rank, monkeypatch):
    monkeypatch.setattr(Event, "query", lambda event: torch.cuda.current_device())
    with rank.watch.during("step 1", 60):
        rank.launch()
        rank.check_until(500)
    assert not rank.ended


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_ends_a_rank_that_waits_and_no_other(monkeypatch, seed):
    """Launches fall between any two things that a check does; replays take any time below the limit, or for ever."""
    draw, limit = random.Random(seed), 60.0
    rank = Rank(monkeypatch)
    with rank.watch.during("a capture before the first step"):
        assert rank.watch._thread is None, "watched before there is a time-out"
    query = Event.query

    def asked(event):
        if draw.random() < 0.3 and rank.device.done == rank.device.launched:
            rank.launch()
            rank.finish()
        return query(event)

    monkeypatch.setattr(Event, "query", asked)
    for step in range(20):
        with rank.watch.during(f"step {step}", limit):
            for _ in range(draw.randrange(4)):
                if draw.random() < 0.5:
                    rank.meanwhile = [rank.launch]
                    rank.watch.check()
                else:
                    rank.launch()
                rank.check_until(rank.now + draw.uniform(0, limit - 1))
                rank.finish()
            if draw.random() < 0.2:
                rank.check_until(rank.now + draw.uniform(0, 5 * limit))
        draw.choice((rank.sleep, lambda s: rank.check_until(rank.now + s)))(draw.uniform(0, 20 * limit))
    assert not rank.ended
    with rank.watch.during("the last step"):  # the time-out is that of the step before
        rank.meanwhile = []
        rank.launch()
        begun, queries = rank.now, rank.device.queries
        rank.check_until(begun + limit - 1)
        assert not rank.ended and rank.device.queries == queries, "it would end a capture that checks all threads"
        monkeypatch.setattr(Event, "query", query)
        rank.check_until(begun + limit + 2 * rank.watch.interval_s)
    (message,) = rank.ended
    assert message.startswith("the last step: ")


# The end


SCRIPT = """
import logging, sys, threading, time
from types import SimpleNamespace
logging.basicConfig(stream=sys.stderr)
from bridge_cg_plugin.upstream.parallel import watchdog
watchdog.REPORT_S = SECONDS
never = SimpleNamespace(record=lambda: None, query=lambda: False)
watch = watchdog.Watchdog(watchdog.end_process, event=lambda: never)
def other_threads_work():
    time.sleep(60)
threading.Thread(target=other_threads_work, daemon=True).start()
def wait_for_the_device():
    WAIT
with watch.during("step 3", 0.2):
    watch.launched("replay of the forward of vision_encoder")
    wait_for_the_device()
"""


def ends(wait, report_s="60"):
    """Run a process whose replay never ends; returns it, ended."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("SECONDS", report_s).replace("WAIT", wait)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )


BLOCKED = "lock = threading.Lock(); lock.acquire(); lock.acquire()"


def test_the_process_ends_with_its_stacks_rank_step_and_region():
    done = ends(BLOCKED)
    assert done.returncode == watchdog.TIMEOUT_STATUS == 124
    stacks, ended, reason = done.stderr.partition("[rank 3] this rank ends in step 3: ")
    assert ended and "in other_threads_work" in stacks and "in wait_for_the_device" in stacks
    assert reason.startswith("the replay of the forward of vision_encoder has not ended")
