"""`python -m bench [NAME ...] [--json FILE]`: prints each figure beside the ceiling of the same run.

Names: transfer (inline Get and Put), rates (keys a second, memory a block), ping (small calls beside large ones).
Exits 1 if a bound is missed. Figures of one run compare with each other only: the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from bench.report import Row, show, write_json

BENCHES = {"transfer": "Inline transfers", "rates": "Keys a second", "ping": "Small calls beside large ones"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every figure here")
    arguments = parser.parse_args()
    unknown = [n for n in arguments.names if n not in BENCHES]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    results: dict[str, list[Row]] = {}
    for name in arguments.names or BENCHES:
        results[name] = import_module(f"bench.{name}").run()
        show(BENCHES[name], results[name])
    if arguments.json is not None:
        write_json(arguments.json, results)
    missed = [row.name for rows in results.values() for row in rows if row.holds is False]
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
