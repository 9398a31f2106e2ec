"""The GPU tests' training processes are forked from a server: its imports leave CUDA alone where there is a GPU too."""

from examples.photographs.processes import TrainingProcess

from .trainings import ENVIRONMENT


def test_training_processes_are_forked(trained, tmp_path, caplog):
    process = TrainingProcess(tmp_path / "run.log", 1, (0,), environment=ENVIRONMENT, forked=True)
    process.wait_until_ready()
    process.close()
    assert process.forked, caplog.text
