"""One search for sites: the run of the example, what was asked for, what was found so far, and the trial of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from sensli.errors import SensliError
from sensli.moves.inserting import Inserts
from sensli.moves.point import ListPlace, Point, Ref
from sensli.moves.roles import LAYERS, units_made
from sensli.moves.sites import Kind, Site, Skipped
from sensli.moves.trace.flow import Flow, ModuleCall, SeenTensor
from sensli.moves.trace.graph import is_weight, origin
from sensli.moves.trace.stacks import Surroundings, find_stacks, parent_of
from sensli.moves.trial import LayerRehearsal, Verdict, bisect, move_of


class Refused(SensliError):
    """A place that cannot grow; the text becomes its reason in `Sites.skipped`."""


@dataclass(frozen=True)
class Request:
    """What `find_sites` was asked for."""

    form: str = "auto"
    kernel_size: int | None = None
    block_init: str = "copy"
    what: str = "layers"
    units: int | float = 0.25
    unit_init: str = "sensitive"


@dataclass
class _Candidate:
    """A point of the data flow: what may be put there if the trial refuses what is there now."""

    call: ModuleCall
    moment: int  # in the run, to sort by the data flow
    site: Site
    others: Iterator[Site]

    def take_other(self) -> bool:
        """Become the next best at the point; False where there is none."""
        try:
            self.site = next(self.others)
            return True
        except (StopIteration, Refused):
            return False

    @property
    def family(self) -> object:
        """Sites that go into the same container in the same way hold or fall together."""
        point = self.site.point
        return parent_of(self.site.path), point.chained, point.place is not None, move_of(self.site).family


class Search:
    """Asks the kinds of growth in their order, and keeps what holds in a trial."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        flow: Flow,
        request: Request,
        kinds: list[Kind],
        *,
        added: bool = True,
        learned: dict[object, Any] | None = None,
    ) -> None:
        """``added``: whether a list whose loop adds what its blocks give is a stack of blocks; otherwise it is looked into.

        ``learned``: what the kinds know of this run from an earlier search.
        """
        self.model, self.example, self.flow, self.request, self._kinds = model, example, flow, request, kinds
        self.learned = {} if learned is None else learned
        self.found: list[_Candidate] = []
        self.taken: set[Any] = set()  # graph nodes of points that have a site
        self.skipped: dict[str, str] = {}
        # Forms that go wherever an activation does look into blocks too; the others respect them as units.
        blocks = request.form in ("auto", "residual", "twin")
        self.stacks = find_stacks(flow, added=added and request.form != "residual") if blocks else []
        self.around = Surroundings(flow, self.stacks)

    def find(self, trial: LayerRehearsal) -> tuple[list[Site], list[Skipped]]:
        self._say_refused()
        for kind in self._kinds:
            kind.propose(self)
        self._confirm(trial)
        if not self.found:
            for kind in self._kinds:
                kind.otherwise(self)
            self._confirm(trial)
        self.found.sort(key=lambda candidate: candidate.moment)
        return [each.site for each in self.found], [Skipped(path, reason) for path, reason in self.skipped.items()]

    # --- for the kinds ---

    def offer(
        self, call: ModuleCall, side: str, seen: SeenTensor, sites: Iterator[Site], *, quiet: bool = False
    ) -> None:
        """A candidate at a point, the first of ``sites``; or the reason why there is none, unless it is to be kept ``quiet``."""
        try:
            site = next(sites)
        except Refused as refusal:
            if quiet:
                return  # another kind may do
            self.skipped[call.path] = str(refusal)
            self.taken.add(seen.node)  # one reason per point is enough
            return
        self.taken.add(seen.node)
        if side == "before":
            self.taken.add(origin(seen.node) if call.path not in self.around.blocks else seen.node)
        moment = call.ended if side == "after" else call.began
        self.found.append(_Candidate(call, moment, site, sites))

    def keep(self, call: ModuleCall, moment: int, site: Site) -> None:
        """A site that needs no trial any more: its kind has made one."""
        self.found.append(_Candidate(call, moment, site, iter(())))

    def instead(self, kind: Kind, call: ModuleCall, side: str, seen: SeenTensor) -> Iterator[Site]:
        """What the kinds after this one could do at the boundary of a block."""
        for other in self._kinds[self._kinds.index(kind) + 1 :]:
            yield from other.at(self, call, side, seen)

    def check(self, call: ModuleCall, side: str, seen: SeenTensor, *, block: bool) -> None:
        """Raise `Refused` where no module can go, whatever it is."""
        if not self.flow.reaches(seen):
            raise Refused(
                "no gradient arrives there (the forward pass detaches it, or the output does not depend on it)"
            )
        if side == "before" and not block and not call.positional:
            raise Refused("takes its input by keyword or nested, but a layer before it needs it as the first argument")
        if self.around.in_encoder_layer(call.path):
            raise Refused(
                "is inside torch's TransformerEncoderLayer, which in eval mode reads the weights without calling the modules"
            )
        if "parametrizations" in call.path.split(".") or is_weight(seen.node):
            raise Refused("computes a weight, not an activation: its values do not depend on the input")

    def point(
        self,
        call: ModuleCall,
        side: str,
        seen: SeenTensor,
        *,
        block: bool = False,
        chained: bool | None = None,
        place: ListPlace | None = None,
    ) -> Point:
        since = call.ended if side == "after" else call.began
        near = [(name, self.model.get_submodule(name)) for name in self.around.neighbours(call, seen)]
        return Point(
            anchor=Ref.to(call.path, self.model.get_submodule(call.path)),
            side=side,
            shape=tuple(seen.tensor.shape[1:]),
            neighbours=tuple(Ref.to(name, module) for name, module in near),
            makes=tuple(units_made(module) for _, module in near),
            chained=self.around.chained(call.path) if chained is None else chained,
            overwritten=seen.overwritten or self.around.overwritten_in_training(seen, since),
            slot=call.slot if block and call.slot is not None else 0,
            first_part=side == "after" and call.output is None,
            place=place,
        )

    # --- what holds ---

    def _confirm(self, trial: LayerRehearsal) -> None:
        """Keep what holds in the model; what does not is replaced by the next best, or skipped with the reason."""
        self.found.sort(key=lambda candidate: candidate.moment)
        good, refused = bisect(
            [each for each in self.found if isinstance(each.site.move, Inserts)],
            partial(_attempt, trial),
            family=lambda each: each.family,
            fall_together=_fall_together,
            take_other=_Candidate.take_other,
            at_limit="{}, when tried together with other places",
        )
        self.skipped.update({each.call.path: reason for each, reason in refused})
        # A kind that changes the model in another way has tried its moves itself.
        self.found = [*(each for each in self.found if not isinstance(each.site.move, Inserts)), *good]

    def _say_refused(self) -> None:
        """Modules that could not be grown beside or into, said at once."""
        for path in self.flow.opaque:
            self.skipped[path] = "is a scripted module, which can be neither read nor changed"
        for path, module in self.flow.model.named_modules():
            calls = len(self.flow.calls_of(path))
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.skipped[path] = (
                    "is recurrent: its steps and layers run inside one call, so nothing can go between them"
                )
            elif "quantized" in type(module).__module__:
                self.skipped[path] = "is quantised: its weights are whole numbers, and no gradient passes"
            elif isinstance(module, LAYERS) and calls > 1 and not self.around.in_block(path):
                self.skipped[path] = (
                    f"is used {calls} times in one forward pass, so a layer next to it would not be in a single place"
                )


def _attempt(trial: LayerRehearsal, group: list[_Candidate]) -> Verdict:
    """Try all places of a group at once, and of every family of them one twice: a second growth must work too."""
    sites = [each.site for each in group]
    numbered = reversed(list(enumerate(group)))
    first = {(each.family, getattr(each.site.move, "form", None), each.site.side): index for index, each in numbered}
    again = list(first.values())
    verdict = trial.attempt([*sites, *(sites[i] for i in again)])
    for index in list(verdict.wrong):
        if index >= len(sites):
            verdict.wrong.setdefault(again[index - len(sites)], verdict.wrong.pop(index))
    return verdict


def _fall_together(group: list[_Candidate], reason: str) -> bool:
    """Whether what fails in one place of a container fails in all of them: another form may do there."""
    site = group[0].site
    in_container = site.point.chained or site.point.place is not None
    return in_container and not move_of(site).fixed(site.point)
