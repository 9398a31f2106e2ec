"""Runs that share GPUs: steps side by side, steps alone, places in the order of turns."""

import threading
import time
from contextlib import ExitStack

import pytest

from scripts.performance.measuring.places import Places
from scripts.performance.photographs import turns
from scripts.performance.photographs.arguments import parse
from scripts.performance.photographs.turns import SharedGpus, Turns, steps_alone


class Waiting:
    """A thread that takes GPUs and says when it has them."""

    def __init__(self, gpus, alone):
        self.has = threading.Event()
        self._thread = threading.Thread(target=self._take, args=(gpus, alone))
        self._thread.start()

    def _take(self, gpus, alone):
        gpus.take(alone)
        self.has.set()

    def gets_them(self):
        self._thread.join(10)
        return self.has.is_set()

    def waits(self):
        return not self.has.wait(0.1)


def test_steps_go_side_by_side(tmp_path):
    first, second = (SharedGpus(tmp_path, ["0", "1"]) for _ in range(2))
    first.take(alone=False)
    assert Waiting(second, alone=False).gets_them()
    first.give_back()
    second.give_back()


def test_a_step_alone_waits_for_all_others_and_keeps_later_ones_waiting(tmp_path):
    first, alone, later = (SharedGpus(tmp_path, ["0", "1"]) for _ in range(3))
    first.take(alone=False)
    wants = Waiting(alone, alone=True)
    assert wants.waits()
    after = Waiting(later, alone=False)
    assert after.waits(), "the one that waits to be alone comes first"
    first.give_back()
    assert wants.gets_them() and after.waits()
    alone.give_back()
    assert after.gets_them()
    later.give_back()


def test_other_gpus_are_not_waited_for(tmp_path):
    first, second = SharedGpus(tmp_path, ["0"]), SharedGpus(tmp_path, ["1"])
    first.take(alone=True)
    assert Waiting(second, alone=True).gets_them()
    first.give_back()
    second.give_back()


def test_runs_that_want_the_same_gpus_in_any_order_all_get_them(tmp_path):
    names = (["0", "1"], ["1", "0"], ["1"], ["0", "1"])
    users, lock, wrong = [], threading.Lock(), []

    def run(gpus, own):
        for step in range(30):
            alone = step % 3 == 0
            gpus.take(alone)
            with lock:
                wrong.extend(other for other, others_alone in users if alone or others_alone)
                users.append((own, alone))
            time.sleep(0.0005)
            with lock:
                users.remove((own, alone))
        gpus.give_back()

    threads = [threading.Thread(target=run, args=(SharedGpus(tmp_path, own), own)) for own in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not wrong


def test_the_steps_that_are_timed_are_alone():
    from scripts.performance.photographs.comparison import SKIPPED

    assert list(steps_alone(0)) == []
    assert set(range(SKIPPED, SKIPPED + 5)) <= set(steps_alone(5)) and min(steps_alone(5)) < SKIPPED


def test_a_run_has_its_gpus_alone_in_the_steps_that_it_says(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "visible_gpus", lambda: ["0", "1"])
    run = Turns(tmp_path, range(2, 4))
    others = [SharedGpus(tmp_path, ["1"]) for _ in range(5)]
    waiting = []
    for step in range(5):
        run.on_train_step_start(None)
        waiting.append(Waiting(others[step], alone=False))
        assert waiting[-1].waits() if step in (2, 3) else waiting[-1].gets_them()
        if step < 2:
            others[step].give_back()
    run.on_train_end(None)
    assert all(each.gets_them() for each in waiting)
    for other in others:
        other.give_back()


@pytest.mark.parametrize("holds", [True, False])
def test_set_up_may_wait_for_its_turn(monkeypatch, tmp_path, holds):
    monkeypatch.setattr(turns, "visible_gpus", lambda: ["0"])
    first = Turns(tmp_path, range(0), at_once=holds)
    other = SharedGpus(tmp_path, ["0"])
    wants = Waiting(other, alone=True)
    assert wants.waits() if holds else wants.gets_them()
    first._gpus.give_back()
    assert wants.gets_them()
    other.give_back()


def test_runs_of_several_ranks_do_not_share_gpus(tmp_path):
    from scripts.performance.photographs.training import run_of

    words = ["--train", "eager", "--turns", str(tmp_path)]
    assert run_of(parse(words)).turns == tmp_path
    with pytest.raises(ValueError, match="--turns with the layout TP2: it must have one GPU. Leave out --turns"):
        run_of(parse([*words, "--tensor-parallel", "2"]))


def test_places_are_given_in_the_order_of_turns():
    places, begun = Places([2, 2]), []

    def run(turn, kinds, amount):
        with places.held(turn, kinds, amount):
            begun.append(turn)
            time.sleep(0.01)

    wanted = [(0, (0,), 1), (1, (0, 1), 2), (2, (1,), 1), (3, (0,), 9)]
    with ExitStack() as stack:
        for job in reversed(wanted):
            thread = threading.Thread(target=run, args=job)
            thread.start()
            stack.callback(thread.join)
    assert begun == [0, 1, 2, 3]
