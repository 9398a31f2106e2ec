"""The command `bridge-cg`."""

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 where `doctor` found a problem or `audit` a drift."""
    parser = argparse.ArgumentParser(prog="bridge-cg", description="CUDA graphs for training on Megatron-Bridge")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what the plugin finds here and what to do about problems")
    doctor.add_argument("--no-gpu", action="store_true", help="a machine without a GPU is no problem")
    audit = commands.add_parser("audit", help="compare what the plugin expects with a release, without importing it")
    audit.add_argument(
        "sources",
        nargs="*",
        default=["installed"],
        metavar="WHEEL|FOLDER|installed",
        help="together one release (megatron-bridge and megatron-core); what is installed if left out",
    )
    for command in (doctor, audit):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    if args.command == "audit":
        return run_audit(args.sources, args.json)
    return run_doctor(args.json, not args.no_gpu)


def run_doctor(as_json: bool, wants_gpu: bool = True) -> int:
    """Print the findings; returns 1 if there are problems, else 0."""
    from .doctor import diagnose, render

    found = diagnose(wants_gpu)
    print(json.dumps(found.as_dict()) if as_json else render(found))
    return 1 if found.problems else 0


def run_audit(sources: Sequence[str], as_json: bool) -> int:
    """Print the drift; returns 1 if there is any, 2 if a source cannot be read, else 0."""
    from .audit import AuditError, audit, render

    try:
        found = audit(sources)
    except AuditError as error:
        print(f"bridge-cg audit: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict()) if as_json else render(found))
    return 1 if found.drift else 0


if __name__ == "__main__":
    sys.exit(main())
