"""The `cptools` command. It needs torch and numpy; with rich installed, a terminal gets tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence

import cptools
from cptools import plan_command
from cptools.doctor import Finding, Report, examine


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    args = _parser().parse_args(argv)
    if args.command == "plan":
        return plan_command.run(args)
    if args.command == "doctor":
        report = examine(timeout=args.timeout)
        if args.json:
            print(json.dumps(report.as_json()))
        else:
            _show(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cptools", description="Context-parallel primitives for long contexts.")
    parser.add_argument("--version", action="version", version=f"cptools {cptools.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    plan = commands.add_parser("plan", help="memory, intensity and the largest context of each way to split some GPUs")
    plan_command.add_arguments(plan)
    doctor = commands.add_parser("doctor", help="what this machine has, and which parts of the library run on it")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text")
    doctor.add_argument("--timeout", type=float, default=60.0, help="seconds that importing NIXL may take")
    return parser


def _show(report: Report) -> None:
    sections = (("this machine", report.machine), ("what runs on it", report.runs))
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _show_rich(report.version, sections)
        return
    print(f"cptools {report.version}")
    width = max(len(f.name) for _, findings in sections for f in findings)
    for title, findings in sections:
        print(f"\n{title}")
        for f in findings:
            print(f"  {'yes' if f.ok else 'no ':3}  {f.name:{width}}  {f.detail}")


def _show_rich(version: str, sections: tuple[tuple[str, tuple[Finding, ...]], ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(f"cptools {version}", style="bold"))
    for title, findings in sections:
        table = Table(title=title, title_justify="left", show_header=False)
        for f in findings:
            table.add_row(Text("yes", style="green") if f.ok else Text("no", style="red"), f.name, f.detail)
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
