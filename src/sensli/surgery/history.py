"""The record of all growths of a model: plain data that goes to JSON and comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, overload

from sensli.errors import HistoryError, WrongType, brief_text
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.surgery.rates import OwnRate, RateScaling
from sensli.surgery.record import STEP_NAMES, Record
from sensli.text.commands import PER
from sensli.text.files import write_bytes
from sensli.text.records import Plain, check_types, lenient_data, strict_data
from sensli.text.records import dumps as strict_json
from sensli.text.tables import html_table

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Resized(Plain):
    """A parameter or buffer that got another shape.

    Attributes:
        name: Its name in the model.
        old_shape: Its shape before.
        new_shape: Its shape since.
    """

    name: str
    old_shape: tuple[int, ...]
    new_shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.old_shape} -> {self.new_shape}"


@dataclass(frozen=True)
class Growth(Plain):
    """One growth: where, what, and the names and shapes that changed.

    Attributes:
        site: The site, with the path that its anchor had at that moment.
        number: 1 for the first growth of a model.
        name: The path of the new module, or of the one that got more units.
        parameters: The names of the new parameters.
        resized: The parameters and buffers that got another shape: name, old shape, new shape.
        renames: Old to new, for parameter names that the container could not keep.
        beside: The shapes of the neighbours' parameters.
        rates: What ``lr_factor`` changed, or None.
        own_rate: The separate parameter groups that were added, or None.
        frozen: The names of the parameters that were frozen by this growth.
        freeze_rest: Whether it came with ``freeze_rest``: it trains on when a later growth does.
        details: When and why it was chosen: epoch (or step), merit, ratio; group, the number of the first growth of one decision.
    """

    _needed: ClassVar[tuple[str, ...]] = ("site", "number", "name", "parameters", "renames", "rates", "details")

    site: Site
    number: int
    name: str
    parameters: tuple[str, ...]
    resized: tuple[Resized, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rates: RateScaling | None = None
    own_rate: OwnRate | None = None
    frozen: tuple[str, ...] = ()
    freeze_rest: bool = field(default=False, metadata={"sparse": True})
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"growth {self._line}"

    def __repr__(self) -> str:
        return f"Growth({self._line})"

    @property
    def _line(self) -> str:
        """What has grown, when, and why there."""
        why = [f"{unit} {self.details[unit]}" for unit in STEP_NAMES if unit in self.details]
        if "merit" in self.details:
            why.append(f"merit {self.details['merit']:.2e}")
        if self.details.get("ratio") is not None:
            why.append(f"{self.details['ratio']:.2f} x mean")
        return f"{self.number}: {self._what}" + (f" ({', '.join(why)})" if why else "")

    @property
    def _what(self) -> str:
        """The site, and the name of what is new; a module that only got more units keeps the name that the site says."""
        return f"{self.site}, as {self.name}" if self.parameters else str(self.site)

    @property
    def call(self) -> int | None:
        """The call of `Grower.step` that it came with, or None."""
        return next((self.details[unit] for unit in STEP_NAMES if unit in self.details), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data: dict[str, Any] = strict_data(super().to_dict())
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; data that do not describe a growth are refused with the reason."""
        missing = [key for key in cls._needed if not isinstance(data, Mapping) or key not in data]
        if missing:
            raise HistoryError(
                f"data must be what Growth.to_dict() returned (the key {missing[0]!r} is missing), got {checks.show_value(data)}."
            )
        with reading("the growth"):
            return cls._read(data, "growth")

    @classmethod
    def _read(cls, data: Mapping[str, Any], place: str) -> Self:
        if not isinstance(data, Mapping):
            raise TypeError(f"{place} must be a mapping, got a {type(data).__name__}")
        growth = super().from_dict(lenient_data(data))
        check_types(growth, place)
        check_growth(growth)
        return growth


def as_growths(name: str, value: Iterable[Growth]) -> list[Growth]:
    """Growths in their order: a History, or any other sequence of them."""
    if isinstance(value, (str, bytes, type, Mapping)) or not hasattr(value, "__iter__"):
        checks.refuse(name, "a History or a sequence of Growths (for example grower.history)", value, WrongType)
    growths = list(value)
    for index, growth in enumerate(growths):
        as_growth(f"{name}[{index}]", growth)
    return growths


def as_growth(name: str, value: object) -> Growth:
    return checks.instance(name, value, Growth, "a Growth (for example what insert returned)")


@contextmanager
def reading(what: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise HistoryError(f"{what} is damaged: the key {error} is missing. Use an intact copy.") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise HistoryError(f"{what} is damaged: {type(error).__name__}: {why}. Use an intact copy.") from error


def check_growth(growth: Growth) -> None:
    """Values of the right type that no growth has."""
    if growth.number < 1:
        raise ValueError(f"number {growth.number} cannot be less than 1")
    growth.site.check()
    own = growth.own_rate
    if own is not None and (len(own.groups) != len(own.sources) or min(sum(own.groups, own.sources), default=0) < 0):
        raise ValueError(f"{own} does not say which groups were added")
    shown = {each.name: growth.details[each.name] for each in fields(_Shown) if each.name in growth.details}
    check_types(_Shown(**shown), "details")


@dataclass(frozen=True)
class _Shown:
    """What is shown of the details of a growth, if it is there."""

    epoch: int = 0
    step: int = 0
    merit: float = 0.0
    ratio: float | None = None
    group: int = 0


def current_names(growths: Iterable[Growth]) -> dict[str, Growth]:
    """What the parameters that came with these growths, all of a model, are called now: later ones may have renamed them."""
    names: dict[str, Growth] = {}
    for growth in growths:
        names = {growth.renames.get(name, name): its for name, its in names.items()}
        names.update(dict.fromkeys(growth.parameters, growth))
    return names


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
        header = ["growth", self.record.step_name, "merit", "ratio", "+parameters"]
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
        """How many of the growths added parameters; recycling or removing units adds none, and the parts of one decision count once."""
        return len({growth.details.get("group", growth.number) for growth in self if growth.site.parameters > 0})

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
        record = {"record": strict_data(self.record.to_dict())} if self.record else {}
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
                f"got {checks.show_value(data)}."
            )
        version = data.get("format", FORMAT)
        if type(version) is not int or not 1 <= version <= FORMAT:
            raise HistoryError(
                f"the history has format {brief_text(version)}, but {FORMAT} is the newest that this version knows. "
                "Update sensli, or use an intact copy."
            )
        with reading("the history"):
            record = Record.from_dict(lenient_data(data["record"])) if "record" in data else None
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
    for unit in (record.step_name, *(look.step_name for look in record.decisions)):
        if unit not in STEP_NAMES:
            raise ValueError(f"unit is {unit!r}")
    for look in record.decisions:
        if look.per not in (None, *PER):
            raise ValueError(f"the look at call {look.call} compares merits per {look.per!r}")
        if look.call < 0 or any(not 0 <= index < len(look.merits) for index in look.chosen):
            raise ValueError(f"the look at call {look.call} has chosen {look.chosen} of {len(look.merits)} merits")
