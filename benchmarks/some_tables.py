"""Some of the tables that the scikit-learn estimators are reported on, with more rows than the benchmark takes: less is chance there.

SENSLI_TABLES=DIR python -m benchmarks.some_tables spambase magic --rows 5000
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.estimators import FOLDS, MOST, figures, outcomes, printed
from benchmarks.tables import REPORTED
from sensli.text.tables import text_table


def main() -> None:
    """Some of the tables, with as many rows as one wants."""
    known = {table.name: table for table in REPORTED}
    parser = argparse.ArgumentParser("benchmarks.some_tables", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "tables", nargs="*", default=[*known], metavar="TABLE", help=f"some of {', '.join(known)} (default: all)"
    )
    parser.add_argument("--rows", type=int, default=MOST, help="the most rows of a table (default: %(default)s)")
    parser.add_argument("--folds", type=int, default=FOLDS, help="the number of folds (default: %(default)s)")
    asked = parser.parse_args()
    if unknown := [name for name in asked.tables if name not in known]:
        parser.error(f"TABLE must be one of {', '.join(known)}, got {', '.join(unknown)}.")
    if "SENSLI_TABLES" not in os.environ:
        parser.error("SENSLI_TABLES must name the folder with the tables, see benchmarks/tables.py.")
    tables, folder = [known[name] for name in asked.tables], Path(os.environ["SENSLI_TABLES"])
    found = figures(list(printed(outcomes(tables, folder, asked.rows, asked.folds))))
    print(
        text_table(
            ["figure", "measured", "bar", "detail"], [(one.name, one.shown, one.bar_shown, one.detail) for one in found]
        )
    )


if __name__ == "__main__":
    main()
