"""The record of all growths of a model: plain data that goes to JSON and comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from sensli.errors import HistoryError, brief
from sensli.modules import checks
from sensli.surgery.history.growth import Growth, as_growth, as_growths, reading
from sensli.surgery.history.record import UNITS, Record
from sensli.text.html_tables import html_table
from sensli.text.names import PER
from sensli.text.strict_json import dumps as strict_json
from sensli.text.strict_json import lenient, strict
from sensli.text.typed import check_types
from sensli.text.writing import write_bytes

FORMAT = 1


class History(Sequence[Growth]):
    """The growths of a model, oldest first, and in `record` what a `Grower` saw along the way.

    Args:
        growths: The growths, oldest first (default: none).
        record: The looks and metrics of the training. None starts an empty one.
    """

    def __init__(self, growths: Iterable[Growth] = (), *, record: Record | None = None) -> None:
        self._growths = as_growths("growths", growths)
        self.record = Record() if record is None else checks.instance("record", record, Record, "a Record")

    @overload
    def __getitem__(self, index: int) -> Growth: ...
    @overload
    def __getitem__(self, index: slice) -> list[Growth]: ...
    def __getitem__(self, index: int | slice) -> Growth | list[Growth]:
        return self._growths[index]

    def __len__(self) -> int:
        return len(self._growths)

    def __iter__(self) -> Iterator[Growth]:
        return iter(self._growths)

    def __eq__(self, other: object) -> bool:
        # the growths make the model; what was seen on the way does not
        return isinstance(other, History) and [g.to_dict() for g in self] == [g.to_dict() for g in other]

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        last = f", the last one: {self[-1]._what}" if self else ""
        return f"History({len(self)} {'growth' if len(self) == 1 else 'growths'}{last})"

    def __str__(self) -> str:
        return "\n".join(str(growth) for growth in self) or "no growth yet"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        header = ["growth", self.record.unit, "merit", "ratio", "+parameters"]
        rows = [
            [
                f"{growth.number}: {growth._what}",
                str(growth.call or ""),
                f"{growth.details['merit']:.3e}" if "merit" in growth.details else "",
                f"{growth.details['ratio']:.2f}" if growth.details.get("ratio") is not None else "",
                f"{growth.site.parameters:,}",
            ]
            for growth in self
        ]
        return html_table(header, rows, caption=f"History({len(self)})")

    @property
    def additions(self) -> int:
        """How many of the growths added parameters; recycling or removing units adds none."""
        return sum(growth.site.parameters > 0 for growth in self)

    def append(self, growth: Growth) -> None:
        """Add the newest growth.

        Args:
            growth: What `insert` returned.
        """
        self._growths.append(as_growth("growth", growth))

    def pop(self) -> Growth:
        """Remove and return the newest growth; use it after `undo`."""
        return self._growths.pop()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        record = {"record": strict(self.record.to_dict())} if self.record else {}
        return {"format": FORMAT, "growths": [growth.to_dict() for growth in self], **record}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> History:
        """The inverse of `to_dict`.

        Args:
            data: What `to_dict` returned.

        Raises:
            HistoryError: If the data do not describe a history.
        """
        if not isinstance(data, Mapping) or "growths" not in data:
            raise HistoryError(
                "Not a sensli history: the key 'growths' is missing. Expected what History.to_dict() returned, "
                f"got {checks.shown(data)}."
            )
        version = data.get("format", FORMAT)
        if type(version) is not int or not 1 <= version <= FORMAT:
            raise HistoryError(
                f"the history has format {brief(version)}, but {FORMAT} is the newest that this version knows. "
                "Update sensli, or use an intact copy."
            )
        with reading("the history"):
            record = Record.from_dict(lenient(data["record"])) if "record" in data else None
            if record is not None:
                check_types(record, "record")
                _check_record(record)
            if not isinstance(data["growths"], (list, tuple)):
                raise TypeError(f"growths must be a list, got a {type(data['growths']).__name__}")
            growths = [Growth._read(entry, f"growths[{index}]") for index, entry in enumerate(data["growths"])]
            return cls(growths, record=record)

    def to_json(self) -> str:
        """The history as JSON text; infinities and NaN are written in a way that every JSON reader accepts."""
        try:
            return strict_json(self.to_dict(), indent=1)
        except (TypeError, ValueError, RecursionError) as error:
            raise HistoryError(
                f"the history cannot be written as JSON: {error}. Keep only numbers, strings, lists and dicts in the details of a growth."
            ) from error

    @classmethod
    def from_json(cls, text: str) -> History:
        """The inverse of `to_json`.

        Args:
            text: What `to_json` returned.

        Raises:
            HistoryError: If the text is not a history.
        """
        checks.instance("text", text, (str, bytes), "the text that History.to_json() returned")
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise HistoryError(
                f"the history is not valid JSON ({error}): the text is truncated or altered. Use an intact copy."
            ) from error
        return cls.from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history to a file; an earlier one is replaced only when the new one is complete.

        Args:
            path: The file to write.

        Raises:
            HistoryError: If the file cannot be written.
        """
        write_bytes(checks.path("path", path), self.to_json().encode(), HistoryError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Read the history from a file that `save` wrote.

        Args:
            path: The file to read.

        Raises:
            HistoryError: If the file cannot be read or does not hold a history.
        """
        path = checks.path("path", path)
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise HistoryError(f"cannot read the history {path}: {error}.") from error
        return cls.from_json(text)


def _check_record(record: Record) -> None:
    if record.stride < 1 or record.calls < 0:
        raise ValueError(f"stride {record.stride} and calls {record.calls} cannot be negative")
    for unit in (record.unit, *(look.unit for look in record.looks)):
        if unit not in UNITS:
            raise ValueError(f"unit is {unit!r}")
    for look in record.looks:
        if look.per not in (None, *PER):
            raise ValueError(f"the look at call {look.call} compares merits per {look.per!r}")
        if look.call < 0 or any(not 0 <= index < len(look.merits) for index in look.chosen):
            raise ValueError(f"the look at call {look.call} has chosen {look.chosen} of {len(look.merits)} merits")
