"""Run upstream's own tests without and with the plugin and compare.

    python scripts/upstream_tests.py CHECKOUT [TESTS...]

CHECKOUT is a copy of the Megatron-Bridge repository of the installed release, outside this project. TESTS are paths
in it; without any, those of the Qwen-VL family. Exit status 1 where a test's outcome differs.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWITCH = "BRIDGE_CG_PLUGIN"
TRAINING = tuple(f"tests/unit_tests/training/test_{name}.py" for name in ("train", "callbacks", "vlm_step", "config"))
TESTS = ("tests/unit_tests/models/qwen_vl", *TRAINING)
PROBE = "import torch, bridge_cg_plugin; print(bridge_cg_plugin.status()['active'])"
COMMAND = (sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "-o", "addopts=")
# A line of pytest's summary; what follows a test's name is its error.
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+?)(?: - .*)?$", re.MULTILINE)


def outcomes(checkout: Path, tests: list[str], switch: str) -> dict[str, str]:
    """Run the tests once; returns test -> outcome.

    Raises:
        RuntimeError: The plugin is not as the switch says, or pytest could not run.
    """
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    variables = {**os.environ, SWITCH: switch, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    probe = subprocess.run([sys.executable, "-c", PROBE], env=variables, capture_output=True, text=True)
    if probe.stdout.split()[-1:] != [str(switch == "1")]:
        raise RuntimeError(f"with {SWITCH}={switch} the plugin is not as it should be: {probe.stdout}{probe.stderr}")
    command = [*COMMAND, f"--rootdir={checkout}", *tests]
    done = subprocess.run(command, cwd=checkout, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout}")
    return {test: outcome for outcome, test in OUTCOME.findall(done.stdout)}


def main(arguments: list[str]) -> int:
    """Run both ways and print the comparison; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    checkout = Path(arguments[0]).resolve()
    tests = arguments[1:] or [test for test in TESTS if (checkout / test).exists()]
    without, active = (outcomes(checkout, tests, switch) for switch in ("0", "1"))
    for test in sorted(without.keys() | active.keys()):
        found = without.get(test, "not run"), active.get(test, "not run")
        if found[0] != found[1] or found[0] in ("FAILED", "ERROR"):
            print(f"{test}: {found[0]} without, {found[1]} with the plugin")
    print(f"{len(without)} tests: {'SAME' if without == active else 'DIFFERENT'}")
    return int(without != active)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
