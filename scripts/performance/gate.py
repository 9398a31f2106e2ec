"""Two checkouts beside each other on one GPU: times of graphs in turns, so that both meet the same machine.

    python scripts/performance/gate.py --base ../before
    python scripts/performance/gate.py --base ../before --cases 1x448,dense_2048 --rounds 6

Each checkout has a process of its own; while one is timed, the other waits. Cases are mixes of images and packs, both
forward plus backward, and whole steps of examples/photographs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# The checkout that a side's process is of is where it runs.
sys.path.insert(0, os.getcwd() if "--answer" in sys.argv else str(ROOT))

from bridge_cg_plugin.cli.runs.recipe import free_port
from examples.photographs.comparison import SKIPPED
from scripts.performance.bench_step import DISTINCT
from scripts.performance.measure import Run, collect, median_times
from scripts.performance.records import at_least, names_of
from tests.models.workloads import CASES as IMAGES

PACKS = {f"dense_{tokens}": tokens for tokens in (2048, 4096)}
STEP = "step"
CASES = (*IMAGES, *PACKS, STEP)
STEPS = 14


class Side:
    """The process of one checkout, which measures when it is told to.

    Args:
        checkout: Its folder.
    """

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        reading, writing = os.pipe()
        command = [sys.executable, str(Path(__file__).resolve()), "--answer", str(writing)]
        environment = {**os.environ, "MASTER_PORT": str(free_port())}
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, pass_fds=[writing], stdin=subprocess.PIPE, stdout=2, text=True
        )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def ask(self, question: str) -> Callable[[], Any]:
        """Ask; returns what waits for the answer.

        Raises:
            RuntimeError: The process has ended, where the answer is asked for.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()

        def answer() -> Any:
            if not (line := self._answers.readline()):
                raise RuntimeError(f"{self.checkout}: its process ended at {question!r}")
            return json.loads(line)

        return answer


def compare(sides: Sequence[Side], case: str, rounds: int) -> str:
    """Measure a case on both sides in turns; returns a line about it."""
    differences = [answer() for answer in [side.ask(f"begin {case}") for side in sides]]
    times: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            times[place].append(sides[place].ask("time")())
    for answer in [side.ask("end") for side in sides]:
        answer()
    pairs = list(zip(*times, strict=True))[SKIPPED if case == STEP else 0 :]
    base, here = (median(found) for found in zip(*pairs, strict=True))
    ratio = median(after / before for before, after in pairs)  # of turns: steps differ in what they train on
    return f"{case}: base {base:.3f} ms, here {here:.3f} ms, ratio {ratio:.4f}; differences {differences}"


@contextmanager
def captured(case: str) -> Iterator[tuple[Run, float]]:
    """Yield what runs a case on graphs once, and how far outputs are from eager's."""
    from scripts.performance.bench_packed import DOCUMENTS
    from scripts.performance.encoders import capture, settings_of
    from tests.models import language_model as lm
    from tests.models import tower

    if case in IMAGES:
        model: Any = tower.build_tower()
        grads, batch = tower.MainGrads(model), tower.make_batch(IMAGES[case], model)
        outputs = lambda: tower.forward(model, batch)  # noqa: E731
        expected = outputs()
        tower.step(model, batch)
        helper: Any = capture(model, buckets=(batch.tokens,), **settings_of("qwen3_vl", IMAGES[case], "plugin"))
        run: Run = partial(tower.step, model, batch)
    else:
        model = lm.build_model(lm.SHAPES["dense"])
        grads, pack = tower.MainGrads(model), lm.make_pack(lm.split(PACKS[case], DOCUMENTS))
        outputs = lambda: [lm.step(model, pack)]  # noqa: E731
        expected = outputs()
        options: dict[str, Any] = {"cuda_graph_max_packed_seqs": DOCUMENTS, "cuda_graph_packed_buckets": [PACKS[case]]}
        helper = lm.new_helper(model, pack, exact=False, cuda_graph_packed_slots=1, **options)
        run = partial(lm.step, model, pack)
    yield run, tower.largest_relative(outputs(), expected)
    helper.delete_cuda_graphs()
    del grads


def answer_questions(say: Callable[[Any], None]) -> None:
    """Measure as the lines of standard input ask; training begins in a process that has run nothing else."""
    from tests.models import tower

    for line in sys.stdin:
        case = line.split()[1]
        if case == STEP:
            train_in_turns(say)
            return
        tower.start_process()
        with captured(case) as (run, difference):
            say(difference)
            while sys.stdin.readline().strip() == "time":
                say(median_times(run, repeats=15, seconds=2.0).ms)
        collect()
        say(None)


def train_in_turns(say: Callable[[Any], None]) -> None:
    """Train; every step waits until it is asked for, and its time is the answer."""
    from megatron.bridge.training.callbacks import Callback

    from examples.photographs import training

    class Begin(Callback):
        def on_train_step_start(self, context: Any) -> None:
            sys.stdin.readline()

    class End(Callback):
        def on_train_step_end(self, context: Any) -> None:
            say(recorders[0].step_ms[-1])

    recorders: list[Any] = []
    pretrain = training.pretrain

    def in_turns(config: Any, step: Any, callbacks: list[Any]) -> Any:
        recorders.append(callbacks[0])
        return pretrain(config, step, callbacks=[Begin(), *callbacks, End()])

    words = ["--steps", str(STEPS), "--language-model", "16x2048", "--distinct", str(DISTINCT), "--loader-workers", "0"]
    say(0.0)
    with mock.patch.object(training, "pretrain", in_turns):
        training.train_words(["--train", "graphs", *words])
    sys.stdin.readline()
    say(None)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--base", type=Path, help="folder of the other checkout")
    parser.add_argument("--cases", type=names_of(*CASES), default=CASES, help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=at_least(1), default=4, help=f"of either side in each case; {STEPS} of steps")
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.answer is None and not (args.base and (args.base / "bridge_cg_plugin").is_dir()):
        parser.error("Cannot compare: --base must be a folder with another checkout.")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the checkouts and print a line for each case."""
    args = parse(arguments)
    if args.answer is not None:
        with os.fdopen(args.answer, "w") as answers:

            def say(answer: Any) -> None:
                print(json.dumps(answer), file=answers, flush=True)

            answer_questions(say)
        return 0
    for cases in filter(None, ([case for case in args.cases if case != STEP], [STEP] * (STEP in args.cases))):
        sides = [Side(args.base.resolve()), Side(ROOT)]
        for case in cases:
            print(compare(sides, case, STEPS if case == STEP else args.rounds), flush=True)
        for side in sides:
            side.process.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
