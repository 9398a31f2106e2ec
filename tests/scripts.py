"""Python scripts in processes of their own, most for Triton: it looks at TRITON_INTERPRET once, when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

INTERPRET = "TRITON_INTERPRET"


def interpreted(script: str, *arguments: Path) -> str:
    """Return what a script writes whose kernels run in Triton's interpreter; it must end well."""
    return output([sys.executable, "-c", script, *map(str, arguments)], {**os.environ, INTERPRET: "1"})


def compiled(script: str, folder: Path) -> str:
    """Return what a script writes whose kernels are compiled, from a file in `folder`: Triton reads their source."""
    file = folder / "compiled.py"
    file.write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
    return output([sys.executable, str(file)], environment | {"PYTHONPATH": os.pathsep.join(sys.path)})


def output(command: list[str], environment: dict[str, str]) -> str:
    """Return what a command writes in an environment; it must end well."""
    environment = {**environment, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
