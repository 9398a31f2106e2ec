"""The process beside a rank that ends it where none of its threads can: what it counts, whom it ends, when it goes."""

import logging
import os
import re
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


def silent(line=f"120\t120\tstep 6\t{REPLAY}", clock=time.monotonic):
    silence = Silence(clock)
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
        silence.heard(f"120\t120\tstep {step}\t{REPLAY}")
        assert not silence.over
    assert silence.doing == "step 11"


def test_a_rank_that_is_stopped_is_not_silent():
    silence = silent()
    pass_time(silence, 1000, stopped=True)
    assert not silence.over and not silence.long and silence.seconds == 0


def test_while_this_process_was_stopped_little_counts():
    silence = silent()
    silence.count(3600, stopped=False)
    assert silence.seconds == watchdog_process.COUNTED * silence.interval_s


@pytest.mark.parametrize(
    "told",
    ["120\t120\t\t", f"120\t120\t\t{REPLAY}", "120\t120\tstep 6\t", f"inf\t120\tstep 6\t{REPLAY}"],
    ids=["idle", "no step", "no replay", "kept"],
)
def test_a_rank_that_waits_for_nobody_or_is_kept_may_be_silent(told):
    silence = silent(told)
    pass_time(silence, 1000)
    assert not silence.over


def test_a_silence_is_long_after_a_part_of_the_groups_time_out_and_once_in_a_step():
    now = 7.0
    silence = silent(f"400\t120\tstep 6\t{REPLAY}", lambda: now)
    now += 20
    silence.heard("400\t120\tstep 6\t")  # its watchdog ran
    pass_time(silence, 60)
    assert not silence.long
    pass_time(silence, silence.interval_s)
    now += 63
    assert silence.long and not silence.over
    assert silence.warning() == (
        "this rank has been in step 6 for 83 s; if it waits for another rank, it ends once a collective has waited for "
        "120 s"
    )
    silence.heard("400\t120\tstep 6\t")
    pass_time(silence, 70)
    assert not silence.long
    silence.heard("400\t120\tstep 7\t")
    pass_time(silence, 63)
    now += 63
    assert silence.long and "in step 7 for 63 s" in silence.warning()


def test_outside_watched_work_no_silence_is_long():
    silence = silent(f"120\t120\t\t{REPLAY}")
    pass_time(silence, 1000)
    assert not silence.long and not Silence().long


def test_checks_are_in_proportion_to_the_limits():
    assert Silence().interval_s == silent("660\t600\tstep\treplay").interval_s == watchdog_process.CHECK_S
    assert silent("4\t600\tstep\treplay").interval_s == 4 / watchdog_process.CHECKS
    assert silent("inf\t30\tstep\treplay").interval_s == 30 / watchdog_process.CHECKS


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


STEP = "step 6, with graphs"
# The watchdog itself would end the rank after LIMIT_S, long after the other process: here the margin is below zero.
LIMIT_S, SILENCE_S = 20.0, 1.5
SCRIPT = f"""
import ctypes, os, signal, sys, time
from types import SimpleNamespace
# PyTorch itself takes seconds to import.
cuda, ranks = SimpleNamespace(Event=None), int(os.environ.get("WORLD_SIZE", "1"))
distributed = SimpleNamespace(
    is_available=lambda: True, is_initialized=lambda: ranks > 1, get_world_size=lambda: ranks, get_rank=lambda: 3
)
sys.modules["torch"] = SimpleNamespace(cuda=cuda, distributed=distributed)
from bridge_cg_plugin.upstream.parallel.watchdog import Watchdog
from bridge_cg_plugin.upstream.parallel.watchdog_beats import Beats
never = SimpleNamespace(record=lambda: None, query=lambda: False)
beats = Beats({SILENCE_S} - LIMIT)
watch = Watchdog(print, event=lambda: never, beats=beats)
with_lock = ctypes.PyDLL(None)  # its calls keep the interpreter's lock
def train():
    WORK
assert beats._process is None
with watch.during("{STEP}", LIMIT):
    LAUNCH
    print(beats._process.pid if beats._process else None, flush=True)
    train()
"""
WAIT = "mutex = ctypes.create_string_buffer(64); [with_lock.pthread_mutex_lock(mutex) for _ in range(2)]"


LAUNCH = f"watch.launched('{REPLAY}')"


def rank(work, launch=LAUNCH, limit_s=LIMIT_S, **environment):
    """Start a process with a replay that never ends and that does this while it waits."""
    script = SCRIPT.replace("WORK", work).replace("LAUNCH", launch).replace("LIMIT", str(limit_s))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-W", "always::ResourceWarning", "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Half of it is shorter than the silence that ends a rank.
SHORT_S = 1.6
SLOW = rf"\[rank 3\] this rank has been in {STEP} for \d+ s"


# The rank's own watchdog only beats: where the other process takes long to start, it would be first.
BEATS = "watch.check = watch._beat"


def rank_in_a_collective(work, begin="pass"):
    """Start one of two ranks without replays, whose collectives have a short time-out."""
    return rank(work, begin, SHORT_S, WORLD_SIZE="2")


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


def test_a_rank_in_which_no_thread_runs_is_named_before_nccl_ends_it():
    """The signal ends it as NCCL's watchdog does: from outside of Python."""
    process = rank_in_a_collective(WAIT, BEATS)
    ends = "if it waits for another rank, it ends once a collective has waited for 2 s"
    assert re.fullmatch(f"{SLOW}; {ends}\n", process.stderr.readline())
    process.send_signal(signal.SIGALRM)
    assert ended(process) == "" and process.returncode == -signal.SIGALRM


def test_a_rank_whose_watchdog_runs_is_named_by_it_alone():
    process = rank_in_a_collective("while not watch._warned: time.sleep(0.05)\n    time.sleep(1)")
    assert ended(process).count("this rank has been in") == 1 and process.returncode == 0


def test_short_silences_do_not_add_up():
    process = rank_in_a_collective(
        "watch._warned = True; [with_lock.usleep(200_000) or watch.check() for _ in range(10)]"
    )
    assert ended(process) == "" and process.returncode == 0


def test_a_run_of_one_rank_has_no_other_process_without_collectives_in_replays():
    process = rank("pass", "pass")
    assert process.communicate(timeout=30) == ("None\n", "") and process.returncode == 0


def test_a_user_who_keeps_the_process_is_told_and_keeps_it():
    work = "signal.signal(signal.SIGTERM, lambda *_: None); with_lock.pause(); os._exit(7)"
    process = rank(work, f"{BEATS}; {LAUNCH}", SHORT_S, **{WATCHDOG_MINUTES: "0"})
    assert re.match(SLOW, process.stderr.readline())
    time.sleep(SILENCE_S)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == "" and process.returncode == 7


def test_where_nobody_reads_what_ranks_write_a_stuck_one_is_ended_all_the_same():
    fill = "size = fcntl.fcntl(2, fcntl.F_GETPIPE_SZ); os.write(2, bytes(size))"
    process = rank(f"import fcntl; {fill}; {WAIT}", f"{BEATS}; {LAUNCH}", SHORT_S)
    other = int(process.stdout.readline())
    until(lambda: not runs(other))
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.communicate()


def test_a_stuck_rank_without_standard_error_is_ended():
    """Its stacks must not reach the other process as lines."""
    close = f"os.close(2); {LAUNCH}"
    process = rank(WAIT, close)
    ended(process)
    assert process.returncode == -signal.SIGKILL


def test_a_default_time_out_of_sockets_lets_no_step_wait_for_a_process_that_was_stopped():
    stop = f"import socket; socket.setdefaulttimeout(0.5); {LAUNCH}; os.kill(beats._process.pid, signal.SIGSTOP)"
    steps = "[watch.check() for _ in range(2000)]; os.kill(beats._process.pid, signal.SIGCONT); watch.check()"
    process = rank(f"{steps}; sys.exit(beats._link is None)", stop)
    assert ended(process) == "" and process.returncode == 0


def test_a_process_that_fails_is_named():
    """The program that embeds Python may name itself as Python's executable."""
    process = rank(
        "beats._process.wait(); [watch.check() for _ in range(3)]; time.sleep(0.5)",
        f"sys.executable = '/bin/false'; {LAUNCH}",
    )
    message = "this rank trains without the process that ends it"
    written = ended(process)
    assert written.count(message) == 1 and "'/bin/false', '-I'" in written and "status 1" in written
    assert process.returncode == 0


def test_a_process_that_cannot_start_is_named_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(watchdog_beats, "SCRIPT", tmp_path / "archive.zip" / "script.py")
    beats = Beats()
    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
        for _ in range(2):
            beats.start()
            beats.send("step 1", REPLAY, 60.0, 60.0)
    (message,) = caplog.messages
    assert message.startswith("[rank 0] this rank trains without the process that ends it") and "No such" in message
