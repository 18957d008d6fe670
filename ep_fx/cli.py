"""The command line: ``ep-fx verify FILE``.

FILE holds a graph as `module.print_graph()` or `visualize("graph.txt")` writes it. Nothing runs; no process group and
no device is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ep_fx.graph.parser import ParseError, parse_graph
from ep_fx.verify import RULES, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0: all rules hold, 1: a rule is broken, 2: the file cannot be read as a graph."""
    parser = argparse.ArgumentParser(prog="ep-fx", description="Question graphs that ep_fx printed.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("verify", help="run the rule table on a printed graph")
    check.add_argument("file", type=Path, help="a graph as text: module.print_graph(), or visualize('graph.txt')")
    check.add_argument(
        "--rule", action="append", metavar="ID", help=f"only this rule (may be repeated): {', '.join(RULES)}"
    )
    options = parser.parse_args(arguments)
    return _verify(options.file, options.rule)


def _verify(path: Path, rules: Sequence[str] | None) -> int:
    try:
        graph = parse_graph(path.read_text())
        report = verify(graph, rules)
    except (OSError, ParseError, KeyError) as error:
        print(f"ep-fx verify: {path}: {error}", file=sys.stderr)
        return 2
    print(report)
    if report.ok:
        return 0
    print(report.explain())
    return 1


if __name__ == "__main__":
    sys.exit(main())
