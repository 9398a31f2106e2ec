"""Run upstream's own tests without and with the plugin and compare.

    python scripts/upstream_tests.py CHECKOUT [--keep FOLDER] [TESTS...]

CHECKOUT is a copy of the Megatron-Bridge repository of the installed release, outside this project. TESTS are paths
in it; without any, those of the Qwen-VL family. Exit status 1 where a test's outcome differs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWITCH = "BRIDGE_CG_PLUGIN"
TESTS = (
    "tests/unit_tests/models/qwen_vl",
    "tests/unit_tests/training/test_train.py",
    "tests/unit_tests/training/test_callbacks.py",
    "tests/unit_tests/training/test_vlm_step.py",
    "tests/unit_tests/training/test_config.py",
)
PROBE = "import torch, bridge_cg_plugin; print(bridge_cg_plugin.status()['active'])"


def environment(switch: str) -> dict[str, str]:
    """Return the environment of a run, with this checkout's plugin."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return {
        **os.environ,
        SWITCH: switch,
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def outcomes(report: Path) -> dict[str, str]:
    """Return test -> "passed", "failed", "error" or "skipped", of a JUnit report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        children = {child.tag for child in case}
        words = {"failure": "failed", "error": "error", "skipped": "skipped"}
        outcome = next((word for tag, word in words.items() if tag in children), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def run(checkout: Path, tests: list[str], switch: str, folder: Path) -> dict[str, str]:
    """Run the tests once; returns their outcomes.

    Raises:
        RuntimeError: The plugin is not as the switch says, or pytest could not run.
    """
    variables, report = environment(switch), folder / f"plugin-{switch}.xml"
    probe = subprocess.run([sys.executable, "-c", PROBE], env=variables, capture_output=True, text=True)
    if probe.stdout.split()[-1:] != [str(switch == "1")]:
        raise RuntimeError(f"with {SWITCH}={switch} the plugin is not as it should be: {probe.stdout}{probe.stderr}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        f"--rootdir={checkout}",
    ]
    done = subprocess.run([*command, f"--junitxml={report}", *tests], cwd=checkout, env=variables)
    if done.returncode not in (0, 1) or not report.is_file():
        raise RuntimeError(f"pytest ended with status {done.returncode}")
    return outcomes(report)


def main() -> int:
    """Run both ways and print the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--keep", type=Path, help="keep the two reports in this folder")
    args = parser.parse_args()
    tests = args.tests or [test for test in TESTS if (args.checkout / test).exists()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        without, active = (run(args.checkout.resolve(), tests, switch, folder) for switch in ("0", "1"))
    for name, found in (("without", without), ("with", active)):
        counts = Counter(found.values())
        print(f"{name:8} the plugin: {', '.join(f'{count} {word}' for word, count in sorted(counts.items()))}")
    differing = sorted(t for t in without.keys() | active.keys() if without.get(t) != active.get(t))
    for test in sorted(t for t, outcome in without.items() if outcome in ("failed", "error")):
        print(f"  {without[test]} without the plugin: {test}")
    for test in differing:
        print(f"  differs: {test}: {without.get(test)} without, {active.get(test)} with the plugin")
    print("SAME" if not differing else f"{len(differing)} DIFFER")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
