"""Tables as people have them, made into what networks take: numbers, categories, text, dates and gaps.

`TableReader` makes a matrix of numbers of a frame, an array or a sparse matrix: a category is its index, a date is several numbers, a gap
is NaN. `Features` makes inputs of that matrix: a numerical column becomes a ramp for each piece between its quantiles (the
piecewise-linear encoding of Gorishniy and others, 2022), a category one input that is on, and a gap an input of its own.
"""

from __future__ import annotations

import datetime
import decimal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Number
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from torch import Tensor, nn

from sensli.integrations.fitting import DENSE, SparseRows
from sensli.text.tables import shorten

MOST = 100  # categories of one column: what is rarer shares one place with what is unknown
OFTEN = 2  # rows with a category before it gets a place of its own
DAY = 86400.0
BEYOND = 1.0  # pieces that a value may lie outside of what was seen

# ---- One column as its frame holds it: numbers with NaN, moments of time, or cells of any kind.


def is_frame(table: Any) -> bool:
    """Whether this is a frame of pandas or polars: columns with names and types."""
    return hasattr(table, "columns") and hasattr(table, "dtypes") and hasattr(table, "shape")


def cells_of(table: Any) -> list[Any]:
    """The columns: arrays of numbers (gaps are NaN), of ``datetime64`` or of objects."""
    if not is_frame(table):
        return list((table.toarray() if issparse(table) else np.asarray(table)).T)
    if hasattr(table, "iloc"):
        return [_pandas_cells(table.iloc[:, place]) for place in range(table.shape[1])]
    return [_polars_cells(series) for series in table.get_columns()]


def _pandas_cells(series: Any) -> Any:
    kind = getattr(series.dtype, "kind", "O")
    if str(series.dtype) == "category" or kind not in "biufMm":
        return series.astype(object).to_numpy()
    if kind == "M":
        return (series if getattr(series.dt, "tz", None) is None else series.dt.tz_localize(None)).to_numpy(
            "datetime64[us]"
        )
    if kind == "m":
        return _seconds(series.to_numpy("timedelta64[us]"))
    return series.to_numpy(np.float64, na_value=np.nan)


def _polars_cells(series: Any) -> Any:
    kind = str(series.dtype).split("(")[0]
    if kind == "Datetime":
        series = series.dt.replace_time_zone(None)
    if kind in ("Datetime", "Date"):
        return series.to_numpy().astype("datetime64[us]")
    if kind == "Duration":
        return _seconds(series.to_numpy().astype("timedelta64[us]"))
    if kind == "Time":
        return series.to_physical().cast(float).to_numpy() / 1e9
    if series.dtype.is_numeric() or kind == "Boolean":
        return series.cast(float).to_numpy()
    cells = np.empty(len(series), dtype=object)
    cells[:] = series.to_list()
    return cells


def _seconds(spans: Any) -> Any:
    return np.where(np.isnat(spans), np.nan, spans.astype("timedelta64[us]").astype(np.int64) / 1e6)


def _is_gap(cell: Any) -> bool:
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, (float, np.floating, np.datetime64, np.timedelta64)) and bool(cell != cell)


def _settled(cells: Any) -> Any:
    """Cells of any kind as numbers or moments, if all of them are; itself otherwise."""
    if cells.dtype.kind in "biuf":
        return cells.astype(np.float64)
    if cells.dtype.kind in "Mm":
        return cells.astype("datetime64[us]") if cells.dtype.kind == "M" else _seconds(cells)
    if cells.dtype.kind != "O":
        return cells.astype(object)
    gaps = np.fromiter(map(_is_gap, cells), bool, len(cells))
    known = cells[~gaps]
    if all(isinstance(cell, (Number, decimal.Decimal, np.bool_)) for cell in known):
        if any(isinstance(cell, complex) for cell in known):
            raise ValueError(f"Complex data not supported, got {_shown(cells)}.")
        found = np.full(len(cells), np.nan)
        found[~gaps] = known.astype(np.float64)
        return found
    if all(isinstance(cell, (datetime.date, np.datetime64)) for cell in known):
        moments = np.full(len(cells), np.datetime64("NaT"), "datetime64[us]")
        moments[~gaps] = [_without_zone(cell) for cell in known]
        return moments
    if all(isinstance(cell, (datetime.timedelta, np.timedelta64)) for cell in known):
        found = np.full(len(cells), np.nan)
        found[~gaps] = _seconds(np.array([np.timedelta64(cell) for cell in known], "timedelta64[us]"))
        return found
    return cells


def _without_zone(cell: Any) -> np.datetime64:
    return np.datetime64(cell.replace(tzinfo=None) if isinstance(cell, datetime.datetime) else cell, "us")


def _word(cell: Any) -> str | None:
    """A category as text, the same for 3, 3.0 and numpy's 3; None for a gap."""
    if _is_gap(cell):
        return None
    if isinstance(cell, (float, np.floating)) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)


# ---- What a column was in `fit`, and its numbers.


@dataclass
class Column:
    """What a column was when it was first read: ``"number"``, ``"category"`` or ``"date"``."""

    name: str
    kind: str
    places: dict[str, int] = field(default_factory=dict)  # of the categories that have a place of their own

    @classmethod
    def of(cls, name: str, cells: Any, chosen: bool | None) -> Column:
        """``chosen``: whether the user calls it a category (None: whether it is one is read from its cells)."""
        cells = _settled(cells)
        if not chosen and (cells.dtype.kind == "f" or chosen is False):
            return cls(name, "number")
        if not chosen and cells.dtype.kind == "M":
            return cls(name, "date")
        counts = Counter(word for word in map(_word, cells.tolist()) if word is not None)
        often = [word for word, count in counts.most_common(MOST) if count >= OFTEN]
        return cls(name, "category", {word: place for place, word in enumerate(sorted(often))})

    @property
    def parts(self) -> list[bool]:
        """For each column of numbers that this one becomes, whether these are categories."""
        return {"number": [False], "category": [True], "date": [False, False, True, False]}[self.kind]

    def numbers(self, cells: Any) -> list[Any]:
        """The numbers of these cells, one array for each part."""
        if self.kind == "category":
            other = len(self.places)
            words = map(_word, _settled(cells).tolist())
            return [np.array([np.nan if word is None else self.places.get(word, other) for word in words], np.float64)]
        cells = _settled(cells)
        if self.kind == "date":
            if cells.dtype.kind == "f" and np.isnan(cells).all():  # gaps only
                return [cells] * 4
            if cells.dtype.kind != "M":
                raise ValueError(f"{self.name} must be dates, as in fit, got {_shown(cells)}.")
            return _parts_of_time(cells)
        if cells.dtype.kind == "M":
            raise ValueError(f"{self.name} must be numbers, got dates such as {_shown(cells)}.")
        if cells.dtype.kind == "O":
            cells = np.array([np.nan if _is_gap(cell) else cell for cell in cells], dtype=object)
            try:
                cells = cells.astype(np.float64)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error}: {self.name} must be numbers. Name it in categorical_features=.") from None
        return [cells]


def _shown(cells: Any) -> str:
    return repr(next((str(cell) for cell in cells.tolist() if not _is_gap(cell)), "gaps"))


def _parts_of_time(moments: Any) -> list[Any]:
    """Seconds since 1970, which may be negative; the month with its days as a share; the day of the week; the hour of the day."""
    gaps = np.isnat(moments)
    seconds = moments.astype(np.int64) / 1e6
    days = np.floor(seconds / DAY)
    months = moments.astype("datetime64[M]")
    into = (moments.astype("datetime64[D]") - months.astype("datetime64[D]")).astype(np.int64)
    parts = [seconds, months.astype(np.int64) % 12 + into / 31, (days + 3) % 7, (seconds - days * DAY) / 3600]
    return [np.where(gaps, np.nan, part) for part in parts]


class TableReader:
    """Makes numbers of tables like the first one."""

    def __init__(self, table: Any, categorical: Any, estimator: str) -> None:
        """``categorical``: as the argument ``categorical_features`` of the estimators."""
        self.sparse = issparse(table) and table.shape[0] * table.shape[1] > DENSE
        if self.sparse:
            self._read_sparse(table, categorical, estimator)
            return
        cells = cells_of(table)
        names = [f"column {name!r}" for name in (map(str, table.columns) if is_frame(table) else range(len(cells)))]
        chosen = _chosen(categorical, table, len(cells), estimator)
        if isinstance(categorical, str) and is_frame(table):
            chosen = [_is_category(dtype) or None for dtype in _dtypes(table)]
        self.columns = [Column.of(*each) for each in zip(names, cells, chosen, strict=True)]

    def _read_sparse(self, table: Any, categorical: Any, estimator: str) -> None:
        """All columns are numbers, and none is looked at: they may be many."""
        if any(_chosen(categorical, table, table.shape[1], estimator)):
            raise ValueError(
                f"categorical_features must be 'from_dtype' or None for a sparse matrix of more than {DENSE:,} cells, got "
                f"{shorten(repr(categorical), 80)}. Encode the categories as columns of 0 and 1."
            )
        self.columns = [Column(f"column {place}", "number") for place in range(table.shape[1])]

    @property
    def parts(self) -> list[bool]:
        """For each column of the matrix, whether its numbers are categories."""
        return [part for column in self.columns for part in column.parts]

    def read(self, table: Any) -> Any:
        """The matrix of a table with the same columns, sparse if the first table was and was large."""
        if self.sparse:
            return table if issparse(table) else csr_array(self._dense(table))
        return self._dense(table.toarray() if issparse(table) else table)

    def _dense(self, table: Any) -> Any:
        if not is_frame(table) and table.dtype.kind == "f" and not any(self.parts):
            return table
        arrays = [
            array
            for column, cells in zip(self.columns, cells_of(table), strict=True)
            for array in column.numbers(cells)
        ]
        return np.stack(arrays, axis=1) if arrays else np.empty((len(table), 0))


def _dtypes(frame: Any) -> list[Any]:
    return list(frame.dtypes)


def _is_category(dtype: Any) -> bool:
    return str(dtype).split("(")[0] in ("category", "Categorical", "Enum")


def _chosen(categorical: Any, table: Any, count: int, estimator: str) -> list[bool | None]:
    """Of each column whether it is a category; None where its cells tell."""
    if isinstance(categorical, str):  # "from_dtype"
        return [None] * count
    if categorical is None:
        return [False] * count
    asked = np.asarray(categorical)
    wrong = f"categorical_features must be 'from_dtype', None, or the places, names or a mask of columns for {estimator}, got"
    if asked.size == 0:
        return [False] * count
    if asked.ndim != 1 or asked.dtype.kind not in "biuUO":
        raise ValueError(f"{wrong} {categorical!r}.")
    if asked.dtype.kind == "b":
        if len(asked) != count:
            raise ValueError(
                f"categorical_features must have one entry for each of {count} columns as a mask, got {len(asked)}."
            )
        return [bool(each) for each in asked]
    if asked.dtype.kind in "iu":
        if (outside := asked[(asked < 0) | (asked >= count)]).size:
            raise ValueError(
                f"categorical_features must be places of {count} columns, from 0 on, got {int(outside[0])}."
            )
        return [place in asked for place in range(count)]
    if not is_frame(table):
        raise ValueError(
            f"categorical_features must be places or a mask where columns have no names, got {categorical!r}."
        )
    names = [str(name) for name in table.columns]
    if unknown := [str(name) for name in asked if str(name) not in names]:
        raise ValueError(f"categorical_features must be among {shorten(', '.join(names), 80)}, got {unknown[0]!r}.")
    return [name in {str(each) for each in asked} for name in names]


# ---- The inputs of networks.


class Features(nn.Module):
    """Inputs of networks from a matrix of a `TableReader`, each with mean zero over the training samples; a gap is zero too.

    ``parts`` says which columns are categories. A numerical column is cut into at most ``bins`` pieces of equally many samples;
    with one it stays as it is, standardised. A column of a sparse matrix is only divided by the size of its entries, so zero stays zero.
    """

    column: Tensor
    low: Tensor
    slope: Tensor
    least: Tensor
    most: Tensor
    flagged: Tensor
    code: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, x: Any, weight: Any, parts: Sequence[bool], bins: int) -> None:
        super().__init__()
        ramps, flags = list[tuple[int, float, float, float, float]](), list[tuple[int, float]]()
        pieces = list[int]()
        for place, (values, category) in enumerate(() if issparse(x) else zip(x.T, parts, strict=True)):
            gaps = np.isnan(values)
            known = np.unique(values[~gaps])
            if category and len(known) + gaps.any() > 1:
                flags += [(place, code) for code in known]
            elif not category and len(known) > 1:
                found = _ramps(values[~gaps], weight[~gaps], bins)
                ramps += [(place, *ramp) for ramp in found]
                pieces += [len(found)] * len(found)
            if gaps.any() and len(known):
                flags.append((place, np.nan))
        if not ramps and not flags:  # sparse, or nothing varies, as in a single sample: all columns as they are
            ramps, pieces = [(place, 0.0, 1.0, -np.inf, np.inf) for place in range(x.shape[1])], [1] * x.shape[1]
        for index, name in enumerate(("column", "low", "slope", "least", "most")):
            self._keep(name, [ramp[index] for ramp in ramps])
        self._keep("flagged", [place for place, _ in flags])
        self._keep("code", [code for _, code in flags])
        if issparse(x):
            mean, scale = np.zeros(x.shape[1]), _entry_sizes(x, weight)
        else:
            mean, scale = column_moments(self.raw(torch.tensor(x, dtype=torch.float64, device="cpu")).numpy(), weight)
        scale[: len(pieces)] *= np.sqrt(np.array(pieces))  # a column counts as one, however many pieces it has
        self._keep("mean", mean)
        self._keep("scale", scale)

    def _keep(self, name: str, values: Any) -> None:
        kind = torch.int64 if name in ("column", "flagged") else torch.float64
        self.register_buffer(name, torch.tensor(np.asarray(values), dtype=kind, device="cpu"))

    @property
    def count(self) -> int:
        """The number of inputs."""
        return len(self.mean)

    def raw(self, x: Tensor) -> Tensor:
        """The inputs before they are standardised."""
        ramps = ((x[:, self.column] - self.low) * self.slope).clamp(self.least, self.most)
        cells = x[:, self.flagged]
        flags = torch.where(self.code.isnan(), cells.isnan(), cells == self.code)
        return torch.cat([ramps, flags.to(x.dtype)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.raw(x) - self.mean) / self.scale).nan_to_num(0.0)

    def inputs(self, x: Any, precision: torch.dtype, device: torch.device) -> Tensor | SparseRows:
        """What networks train on: the inputs of this matrix, sparse if it is."""
        if not issparse(x):
            return self.forward(torch.tensor(x, device="cpu")).to(device, precision)
        values = np.nan_to_num(x.data) / self.scale.numpy()[x.indices]
        starts, columns = (torch.tensor(each, dtype=torch.int64, device=device) for each in (x.indptr, x.indices))
        return SparseRows(starts, columns, torch.tensor(values, dtype=precision, device=device), x.shape)


def _entry_sizes(x: Any, weight: Any) -> Any:
    """The root of the mean square of the entries of each column that are not zero; one where there are none."""
    weight = np.repeat(weight, np.diff(x.indptr)) * (np.nan_to_num(x.data) != 0)
    total = np.bincount(x.indices, weight, x.shape[1])
    squares = np.bincount(x.indices, weight * np.nan_to_num(x.data) ** 2, x.shape[1])
    return np.sqrt(np.divide(squares, total, out=np.ones(x.shape[1]), where=total > 0))


def _ramps(values: Any, weight: Any, bins: int) -> list[tuple[float, float, float, float]]:
    """Where each ramp begins, its slope, and the least and the largest value that it takes."""
    edges = _quantiles(values, weight, bins) if bins > 1 else values[:0]
    if len(edges) < 3:
        return [(0.0, 1.0, -np.inf, np.inf)]
    ramps = [(low, 1 / (high - low), 0.0, 1.0) for low, high in pairwise(edges)]
    ramps[0] = (*ramps[0][:2], -BEYOND, 1.0)
    ramps[-1] = (*ramps[-1][:3], 1 + BEYOND)
    return ramps


def _quantiles(values: Any, weight: Any, bins: int) -> Any:
    """The edges of at most so many pieces of equal weight; a sample of weight two counts as two samples."""
    known, where = np.unique(values, return_inverse=True)
    if len(known) <= 2 * bins:  # few values, such as the hours of a day: each is an edge
        return known
    total = np.cumsum(np.bincount(where, weight))
    inner = known[np.searchsorted(total, total[-1] * np.arange(1, bins) / bins * (1 - 1e-12))]
    return np.unique([known[0], *inner, known[-1]])


def column_moments(values: Any, weight: Any) -> tuple[Any, Any]:
    """Weighted mean and deviation of each column without its gaps; a column that does not vary keeps its scale."""
    shares = np.where(np.isnan(values), 0.0, weight[:, None])
    total = np.maximum(shares.sum(0), np.finfo(float).tiny)
    mean = np.nansum(values * shares, axis=0) / total
    scale = np.sqrt(np.nansum((values - mean) ** 2 * shares, axis=0) / total)
    return mean, np.where(scale > 1e-12 * np.maximum(1.0, np.abs(mean)), scale, 1.0)
