"""Two checkouts in turns, without a GPU: what a side answers, and what is made of answers."""

import io

import pytest

from scripts.performance import gate

from .towers import new_tower


def test_a_side_answers_what_it_is_asked(monkeypatch):
    monkeypatch.setattr("tests.models.tower.build_tower", new_tower)
    monkeypatch.setitem(gate.IMAGES, "1x448", [(1, 4, 4)])
    monkeypatch.setattr("sys.stdin", io.StringIO("begin 1x448\ntime\ntime\nend\n"))
    answers = []
    gate.answer_questions(answers.append)
    difference, *times, end = answers
    assert difference <= 1e-6 and len(times) == 2 and min(times) > 0 and end is None


class Side:
    def __init__(self, times):
        self.times, self.asked = list(times), []

    def ask(self, question):
        self.asked.append(question)
        answer = self.times.pop(0) if question == "time" else 0.0
        return lambda: answer


def test_sides_are_timed_in_turns_and_steps_without_warm_up():
    sides = Side([2.0, 3.0, 4.0]), Side([6.0, 6.0, 7.0])
    assert "base 3.000 ms, here 6.000 ms, ratio 2.0000" in gate.compare(sides, "1x448", 3)
    assert sides[0].asked == ["begin 1x448", "time", "time", "time", "end"]
    steps = Side([9.0] * gate.SKIPPED + [2.0]), Side([9.0] * gate.SKIPPED + [1.0])
    assert "ratio 0.5000" in gate.compare(steps, gate.STEP, gate.SKIPPED + 1)


def test_without_another_checkout_there_is_nothing_to_compare(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gate.parse(["--base", str(tmp_path)])
    assert "--base must be a folder with another checkout" in capsys.readouterr().err
