"""The command `bridge-cg`."""

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, 1 where `doctor` found a problem."""
    parser = argparse.ArgumentParser(prog="bridge-cg", description="CUDA graphs for training on Megatron-Bridge")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what the plugin finds here and what to do about problems")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    return run_doctor(args.json)


def run_doctor(as_json: bool) -> int:
    """Print the findings; returns 1 if there are problems, else 0."""
    from .doctor import diagnose, render

    found = diagnose()
    print(json.dumps(found.as_dict()) if as_json else render(found))
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
