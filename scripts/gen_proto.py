"""Generates the message stubs of proto/kvstore/v1 into proto/kvstore_wire/v1.

usage: python scripts/gen_proto.py [--check]

The stubs live in the package `kvstore_wire` although the contract's package is `kvstore.v1`: the server's own Python
package is called `kvstore`, and the client must not need it. Service stubs are not generated; both sides bind methods
by name (see kvstore_wire.methods), which lets the inline streams pass payload without a copy by the codec.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TARGET = PROTO / "kvstore_wire" / "v1"


def generate(out: Path) -> dict[str, str]:
    """Runs protoc into `out` and returns {file name: text} with imports moved to kvstore_wire."""
    files = sorted(str(p.relative_to(PROTO)) for p in (PROTO / "kvstore" / "v1").glob("*.proto"))
    status = protoc.main(["protoc", f"-I{PROTO}", f"--python_out={out}", f"--pyi_out={out}", *files])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    made = sorted((out / "kvstore" / "v1").iterdir())
    return {p.name: p.read_text().replace("from kvstore.v1 import", "from kvstore_wire.v1 import") for p in made}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if the stubs are out of date")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        texts = generate(Path(folder))
    stale = [name for name, text in texts.items() if not _same(TARGET / name, text)]
    if check:
        print("stale stubs: " + ", ".join(stale) + " (run: make proto)" if stale else "stubs are up to date")
        return 1 if stale else 0
    for name, text in texts.items():
        (TARGET / name).write_text(text)
    return 0


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
