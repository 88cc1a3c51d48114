"""The record of one growth: plain data that goes to JSON and comes back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sensli.errors import HistoryError, WrongType
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.surgery.history.record import UNITS
from sensli.surgery.state.own_rate import OwnRate
from sensli.surgery.state.rates import RateScaling
from sensli.text.strict_json import lenient, strict
from sensli.text.typed import check_types

_NEEDED = (
    "site",
    "number",
    "name",
    "parameters",
    "renames",
    "rates",
    "details",
)  # of one growth; later keys may be absent


@dataclass(frozen=True)
class Resized:
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"name": self.name, "old_shape": list(self.old_shape), "new_shape": list(self.new_shape)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Resized:
        """The inverse of `to_dict`."""
        return cls(data["name"], tuple(data["old_shape"]), tuple(data["new_shape"]))


@dataclass(frozen=True)
class Growth:
    """One growth: where, what, and the names and shapes that changed.

    Attributes:
        site: The site, with the path that its anchor had at that moment.
        number: 1 for the first growth of a model.
        name: The path of the new module, or of the one that got more units.
        parameters: The names of the new parameters.
        resized: The parameters and buffers that got another shape: name, old shape, new shape.
        renames: Old to new, for parameter names that the container could not keep.
        beside: The shapes of the neighbours' parameters.
        rates: What ``lr_scale`` changed, or None.
        own_rate: The separate parameter groups that were added, or None.
        frozen: The names of the parameters that were frozen by this growth.
        freeze_rest: Whether it came with ``freeze_rest``: it trains on when a later growth does.
        details: When and why it was chosen: epoch (or step), merit, ratio.
    """

    site: Site  # with the path that the anchor had at that moment
    number: int  # 1 for the first growth of a model
    name: str  # path of the module that is new or has changed
    parameters: tuple[str, ...]  # names of the new parameters
    resized: tuple[Resized, ...] = ()  # what got another shape
    renames: Mapping[str, str] = field(default_factory=dict)  # old to new, for names that the container could not keep
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of the neighbours' parameters
    rates: RateScaling | None = None  # what the learning-rate factor changed
    own_rate: OwnRate | None = None  # its separate groups
    frozen: tuple[str, ...] = ()  # names of the parameters that were trained before and rest since
    freeze_rest: bool = False  # a later growth that freezes the rest does not freeze this one
    details: Mapping[str, Any] = field(default_factory=dict)  # when and why it was chosen: epoch or step, merit, ratio

    def __str__(self) -> str:
        return f"growth {self.number}: {self._what}" + because(self.details)

    def __repr__(self) -> str:
        return f"Growth({self.number}: {self._what}{because(self.details)})"

    @property
    def _what(self) -> str:
        """The site, and the name of what is new; a module that only got more units keeps the name that the site says."""
        return f"{self.site}, as {self.name}" if self.parameters else str(self.site)

    @property
    def call(self) -> int | None:
        """The call of `Grower.step` that it came with, or None."""
        return next((self.details[unit] for unit in UNITS if unit in self.details), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {
            "site": self.site.to_dict(),
            "number": self.number,
            "name": self.name,
            "parameters": list(self.parameters),
            "resized": [each.to_dict() for each in self.resized],
            "renames": dict(self.renames),
            "beside": {name: list(shape) for name, shape in self.beside.items()},
            "rates": self.rates.to_dict() if self.rates else None,
            "own_rate": self.own_rate.to_dict() if self.own_rate else None,
            "frozen": list(self.frozen),
            **({"freeze_rest": True} if self.freeze_rest else {}),
            "details": dict(self.details),
        }
        return {name: strict(value) for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Growth:
        """The inverse of `to_dict`; data that do not describe a growth are refused with the reason."""
        missing = [key for key in _NEEDED if not isinstance(data, Mapping) or key not in data]
        if missing:
            raise HistoryError(
                f"data must be what Growth.to_dict() returned (the key {missing[0]!r} is missing), got {checks.shown(data)}."
            )
        with reading("the growth"):
            return cls._read(data, "growth")

    @classmethod
    def _read(cls, data: Mapping[str, Any], place: str) -> Growth:
        if not isinstance(data, Mapping):
            raise TypeError(f"{place} must be a mapping, got a {type(data).__name__}")
        growth = cls._of(lenient(data))
        check_types(growth, place)
        check_growth(growth)
        return growth

    @classmethod
    def _of(cls, data: Mapping[str, Any]) -> Growth:
        return cls(
            site=Site.from_dict(data["site"]),
            number=data["number"],
            name=data["name"],
            parameters=tuple(data["parameters"]),
            resized=tuple(Resized.from_dict(each) for each in data.get("resized", ())),
            renames=dict(data["renames"]),
            beside={name: tuple(shape) for name, shape in data.get("beside", {}).items()},
            rates=RateScaling.from_dict(data["rates"]) if data["rates"] else None,
            own_rate=OwnRate.from_dict(data["own_rate"]) if data.get("own_rate") else None,
            frozen=tuple(data.get("frozen", ())),
            freeze_rest=data.get("freeze_rest", False),
            details=dict(data["details"]),
        )


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
    check_types(
        _Shown(**{name: growth.details[name] for name in (*UNITS, "merit", "ratio") if name in growth.details}),
        "details",
    )


@dataclass(frozen=True)
class _Shown:
    """What is shown of the details of a growth, if it is there."""

    epoch: int = 0
    step: int = 0
    merit: float = 0.0
    ratio: float | None = None


def because(details: Mapping[str, Any]) -> str:
    parts = [f"{unit} {details[unit]}" for unit in UNITS if unit in details]
    if "merit" in details:
        parts.append(f"merit {details['merit']:.2e}")
    if details.get("ratio") is not None:
        parts.append(f"{details['ratio']:.2f} x mean")
    return f" ({', '.join(parts)})" if parts else ""


def names_of_today(growths: Iterable[Growth]) -> dict[str, Growth]:
    """What the parameters that came with these growths, all of a model, are called now: later ones may have renamed them."""
    names: dict[str, Growth] = {}
    for growth in growths:
        names = {growth.renames.get(name, name): its for name, its in names.items()}
        names.update(dict.fromkeys(growth.parameters, growth))
    return names
