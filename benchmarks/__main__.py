"""`python -m benchmarks`, in the root of the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import run_benchmarks
from sensli.errors import SensliError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; a mistake in the arguments gives one line and exit code 2, Ctrl-C exit code 130."""
    parser = argparse.ArgumentParser(
        "benchmarks",
        description="Measure the published figures as ratios within one run, print them as a table and write them as JSON.",
        epilog="example: SENSLI_DATA=~/data python -m benchmarks --only measure probe",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these benchmarks")
    parser.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="where to write JSON (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if "\0" in str(args.out):
        parser.error("--out contains a NUL character")
    try:
        run_benchmarks(args.only, args.out)
    except KeyboardInterrupt:
        return 130
    except (SensliError, OSError) as error:
        print(f"benchmarks: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
