"""What holds for every width of every model, and for layers beside them: function, independence of new rows, merit, the way back."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from hypothesis import Phase, given, settings

from invariants import REPEATABLE, Broken, check, in_mode, loss_of, moved, outputs, same
from models import untouched
from random_models import Recipe, recipes
from sensli import Site, Sites, find_sites, grow, insert, measure, undo
from sensli.errors import MeasurementError, ZeroMerits
from sensli.moves.width.widening import Widening
from sensli.moves.width.width import Width
from sensli.surgery.optimizers import plan_resizing
from widening import column_gradients, redrawn

NEAR = 1e-10  # relative, in float64


class Widths:
    """One model and all its widths, with ``what="both"`` also its layers."""

    def __init__(self, recipe: Recipe, grow: str = "units") -> None:
        self.recipe = recipe
        self.model, self.x, self.y = recipe.build()
        self.loss = loss_of(recipe, self.model, self.x)
        with untouched(self.model):
            self.sites: Sites = find_sites(self.model, self.x, what=grow, units=2)
        self.before = {train: outputs(self.model, self.x, train) for train in (False, True)}
        # Where noise or dropout takes part, a wider network draws other numbers.
        quiet = not any(word in repr(recipe) for word in ("drop", "noise"))
        self.modes = (False, True) if quiet else (False,)

    def fail(self, promise: str, site: Site, detail: str) -> Broken:
        return Broken(promise, site, self.recipe, detail)

    def measured(self) -> list[tuple[Site, float | None]]:
        """Each site with its rows, and its merit in eval mode; None where the loss has none."""
        if not self.sites:
            return []
        try:
            with untouched(self.model), in_mode(self.model, False):
                merits = measure(self.model, self.sites, [(self.x, self.y)], self.loss, norm="frobenius", ratio=False)
        except ZeroMerits:
            return [(site, 0.0) for site in self.sites]
        except MeasurementError as error:
            if self.recipe.loss != "penalty":  # the only one that may have no merit
                raise self.fail("merit", self.sites[0], str(error)) from error
            return [(site, None) for site in self.sites]
        return [(merit.site, merit.value) for merit in merits]

    def check(self, site: Site, merit: float | None) -> None:
        """Really wider, and back."""
        state = copy.deepcopy(self.model.state_dict())
        edit = Widening(self.model, site)
        edit.build()
        edit.apply()
        plan_resizing((), edit.resized).settle()  # as `grow` does: a graph of the old shapes may be alive
        for train in self.modes:
            now = outputs(self.model, self.x, train)
            if not all(
                torch.allclose(a, b, rtol=NEAR, atol=NEAR) for a, b in zip(self.before[train], now, strict=True)
            ):
                raise self.fail("function", site, f"the output {moved(self.before[train], now)} (training: {train})")
        value = self.gradient(edit)
        if merit and abs(value - merit) > 1e-9 * max(value, merit) + 1e-24:
            raise self.fail("merit", site, f"{merit:.6e} instead of {value:.6e}")
        found = []
        for seed in (1, 2):
            redrawn(edit, seed)
            found.append([outputs(self.model, self.x, train) for train in self.modes])
        if not all(map(same, *found)):
            raise self.fail("independence", site, "the output depends on the new rows")
        edit.revert()
        plan_resizing((), edit.resized).settle()
        self.unchanged(site, state)

    def check_layer(self, site: Site, merit: float | None) -> None:
        """Really inserted, and out again."""
        state = copy.deepcopy(self.model.state_dict())
        growth = insert(self.model, site)
        with in_mode(self.model, False):
            now = outputs(self.model, self.x, False)
            if not same(self.before[False], now):
                raise self.fail("function", site, f"the output {moved(self.before[False], now)}")
            self.loss(self.model(self.x), self.y).backward()
        new = [self.model.get_parameter(f"{growth.name}.{name}").grad for name in site.move.measured]
        value = sum(0.0 if gradient is None else gradient.square().sum().item() for gradient in new)
        self.model.zero_grad()
        if merit and abs(value - merit) > 1e-9 * max(value, merit) + 1e-24:
            raise self.fail("merit", site, f"{merit:.6e} instead of {value:.6e}")
        undo(self.model, growth)
        self.unchanged(site, state)

    def gradient(self, edit: Widening) -> float:
        """The squared norm of what autograd gives to the new columns."""
        with in_mode(self.model, False):
            self.model.zero_grad()
            self.loss(self.model(self.x), self.y).backward()
        value = column_gradients(edit)
        self.model.zero_grad()
        return value

    def grown(self, site: Site) -> None:
        """By the verbs, with an optimizer that has stepped, and back to the bit."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        with in_mode(self.model, False):
            self.loss(self.model(self.x), self.y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with untouched(self.model, optimizer):
            undo(self.model, grow(self.model, site, optimizer=optimizer), optimizer=optimizer)

    def unchanged(self, site: Site, state: dict[str, torch.Tensor]) -> None:
        now = self.model.state_dict()
        if list(now) != list(state) or not all(torch.equal(now[key], state[key]) for key in state):
            raise self.fail("undo", site, "the state dict is not what it was")


def check_widths(recipe: Recipe, grow: str = "units") -> Counter[str]:
    """Raise `Broken` unless every promise is kept at every site; how many of which kind there were."""
    recipe.dtype = "float64"
    widths = Widths(recipe, grow)
    for site, merit in widths.measured():
        (widths.check if isinstance(site.move, Width) else widths.check_layer)(site, merit)
    if widths.sites:
        widths.grown(widths.sites[recipe.seed % len(widths.sites)])
    heads = [getattr(site.move, "heads", 0) for site in widths.sites]
    return Counter(sites=len(heads), heads=sum(map(bool, heads)), refused=len(widths.sites.skipped), models=1)


def survey(count: int) -> tuple[int, int, list[Broken]]:
    """So many random models, whatever fails: how many models and sites there were, and which promises were broken.

    Every tenth is tried as `invariants.check` does: second growths, replay, training.
    """
    seen: Counter[str] = Counter()
    broken: list[Broken] = []

    @settings(REPEATABLE, max_examples=count, phases=[Phase.generate])
    @given(recipes())
    def one(recipe: Recipe) -> None:
        text = repr(recipe)
        seen["tried"] += 1
        try:
            seen.update({"sites": check(recipe)} if seen["tried"] % 10 == 0 else check_widths(recipe, "both"))
        except Broken as failure:
            broken.append(failure)
        except Exception as error:
            broken.append(Broken("no error", None, recipe, f"{type(error).__name__}: {error} ({text})"))

    one()
    return seen["tried"], seen["sites"], broken
