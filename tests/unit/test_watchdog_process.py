"""The process beside a rank that ends it where none of its threads can: what it counts, whom it ends, when it goes."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge_cg_plugin.upstream.environment import WATCHDOG_MINUTES
from bridge_cg_plugin.upstream.parallel import watchdog_beats, watchdog_process
from bridge_cg_plugin.upstream.parallel.watchdog_beats import Beats
from bridge_cg_plugin.upstream.parallel.watchdog_process import Silence

ROOT = Path(__file__).resolve().parents[2]
REPLAY = "replay of the forward of vision_encoder"


def silent(line=f"120\tstep 6\t{REPLAY}"):
    silence = Silence()
    silence.heard(line)
    return silence


def pass_time(silence, seconds, **state):
    for _ in range(round(seconds / silence.interval_s)):
        silence.count(silence.interval_s, **{"stopped": False, **state})


def test_a_rank_that_stays_silent_has_its_limit():
    silence = silent()
    pass_time(silence, 120)
    assert not silence.over
    pass_time(silence, silence.interval_s)
    assert silence.over
    assert str(silence).startswith(f"step 6: its watchdog has not run for 120 s while the {REPLAY}, or a later one,")


def test_a_line_begins_anew():
    silence = silent()
    for step in range(7, 12):
        pass_time(silence, 119)
        silence.heard(f"120\tstep {step}\t{REPLAY}")
        assert not silence.over
    assert silence.doing == "step 11"


def test_a_rank_that_is_stopped_is_not_silent():
    silence = silent()
    pass_time(silence, 1000, stopped=True)
    assert not silence.over and silence.seconds == 0


def test_while_this_process_was_stopped_little_counts():
    silence = silent()
    silence.count(3600, stopped=False)
    assert silence.seconds == watchdog_process.COUNTED * silence.interval_s


@pytest.mark.parametrize("line", ["120\t\t", f"120\t\t{REPLAY}", "120\tstep 6\t"], ids=["idle", "no step", "no replay"])
def test_a_rank_that_waits_for_nobody_may_be_silent(line):
    silence = silent(line)
    pass_time(silence, 1000)
    assert not silence.over


def test_checks_are_in_proportion_to_the_limit():
    assert Silence().interval_s == silent("660\tstep\treplay").interval_s == watchdog_process.CHECK_S
    assert silent("4\tstep\treplay").interval_s == 4 / watchdog_process.CHECKS


def test_a_process_with_any_name_is_found_stopped(tmp_path):
    shell = tmp_path / "a) R (b"
    shell.symlink_to("/bin/sleep")
    with subprocess.Popen([str(shell), "60"]) as process:
        assert not watchdog_process.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda: watchdog_process.is_stopped(process.pid))
        process.kill()
    assert not watchdog_process.is_stopped(process.pid)


# Real processes


# The watchdog itself would end the rank after LIMIT_S, long after the other process: here the margin is below zero.
LIMIT_S, SILENCE_S = 20.0, 1.5
SCRIPT = f"""
import ctypes, os, signal, sys, time
from types import SimpleNamespace
# PyTorch itself takes seconds to import.
cuda, distributed = SimpleNamespace(Event=None), SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = SimpleNamespace(cuda=cuda, distributed=distributed)
from bridge_cg_plugin.upstream.parallel.watchdog import Watchdog
from bridge_cg_plugin.upstream.parallel.watchdog_beats import Beats
never = SimpleNamespace(record=lambda: None, query=lambda: False)
beats = Beats({SILENCE_S - LIMIT_S})
watch = Watchdog(print, event=lambda: never, beats=beats)
with_lock = ctypes.PyDLL(None)  # its calls keep the interpreter's lock
def train():
    WORK
assert beats._process is None
with watch.during("step 6, with graphs", {LIMIT_S}):
    watch.launched("{REPLAY}")
    print(beats._process.pid if beats._process else None, flush=True)
    train()
"""
WAIT = "mutex = ctypes.create_string_buffer(64); [with_lock.pthread_mutex_lock(mutex) for _ in range(2)]"


def rank(work, **environment):
    """Start a process with a replay that never ends and that does this while it waits."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-W", "always::ResourceWarning", "-c", SCRIPT.replace("WORK", work)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def runs(process):
    return Path(f"/proc/{process}/stat").exists()


def ended(process):
    """Return what a rank wrote as errors, after it and the other process have ended."""
    other = int(process.stdout.readline())
    written = process.communicate(timeout=30)[1]
    until(lambda: not runs(other))
    return written


def test_a_rank_in_which_no_thread_runs_is_ended():
    process = rank(WAIT)
    written = ended(process)
    assert process.returncode == -signal.SIGKILL
    message = written.index("[rank 3] this rank ends in step 6, with graphs: its watchdog has not run for 2 s while")
    assert 0 <= written.index("most recent call first") < written.index("in train") < message
    assert f"while the {REPLAY}" in written[message:]


def test_one_that_goes_on_while_it_writes_its_stacks_is_not():
    """The signal ends this wait."""
    process = rank("with_lock.sleep(1000); time.sleep(1)")
    written = ended(process)
    assert process.returncode == 0
    assert "in train" in written and "this rank ends" not in written


def test_one_that_was_stopped_is_not():
    process = rank("time.sleep(3)")
    other = int(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE_S + 1)
    assert runs(other)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0 and not runs(other)


def test_a_rank_that_ends_leaves_no_process_and_no_warning():
    process = rank("pass")
    assert ended(process) == "" and process.returncode == 0


def test_the_other_process_goes_with_a_rank_that_is_killed_and_whose_workers_stay():
    """A worker that C code forked holds the link."""
    process = rank("print(with_lock.fork() or with_lock._exit(with_lock.sleep(60)), flush=True); time.sleep(60)")
    other, worker = (int(process.stdout.readline()) for _ in range(2))
    process.kill()
    until(lambda: not runs(other))
    os.set_blocking(process.stderr.fileno(), False)
    assert process.stderr.buffer.raw.read() is None  # the worker could still write, and nobody wrote
    os.kill(worker, signal.SIGKILL)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == -signal.SIGKILL


def test_a_forked_worker_sends_nothing_and_ends_nobody():
    work = "with watch.during('worker'): watch.check()"
    process = rank(f"os.fork() or exec({work!r}) or sys.exit(beats._link is not None); sys.exit(os.wait()[1] >> 8)")
    assert ended(process) == "" and process.returncode == 0


def test_without_the_other_process_training_goes_on():
    kill = "os.kill(beats._process.pid, signal.SIGKILL)"
    process = rank(f"signal.signal(signal.SIGPIPE, signal.SIG_DFL); {kill}; time.sleep(0.5); watch.check()")
    assert ended(process) == "" and process.returncode == 0


def test_a_user_who_keeps_the_process_has_no_other():
    process = rank("sys.exit(7)", **{WATCHDOG_MINUTES: "0"})
    assert process.communicate(timeout=30) == ("None\n", "") and process.returncode == 7


def test_a_process_that_cannot_start_is_named_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(watchdog_beats, "SCRIPT", tmp_path / "archive.zip" / "script.py")
    beats = Beats()
    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
        for _ in range(2):
            beats.start()
            beats.send("step 1", REPLAY, 60.0)
    (message,) = caplog.messages
    assert message.startswith("[rank 0] this rank trains without the process that ends it") and "No such" in message
