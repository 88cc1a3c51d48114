"""What holds for every width of every model: the function, the independence of new rows, the merit, the way back."""

from __future__ import annotations

import copy
from collections import Counter

import torch

from invariants import Broken, in_mode, loss_fn, moved, outputs, same
from models import untouched
from random_models import Recipe
from sensli import Site, Sites, find_sites, grow, measure, undo
from sensli.errors import ZeroMerits
from sensli.moves.width.widening import Widening
from widening import column_gradients, redrawn

NEAR = 1e-10  # relative, in float64


class Widths:
    """One model and all its widths."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model, self.x, self.y = recipe.build()
        with untouched(self.model):
            self.sites: Sites = find_sites(self.model, self.x, grow="units", units=2)
        self.before = {train: outputs(self.model, self.x, train) for train in (False, True)}
        # Where noise or dropout takes part, a wider network draws other numbers.
        quiet = not any(word in repr(recipe) for word in ("drop", "noise"))
        self.modes = (False, True) if quiet else (False,)

    def fail(self, promise: str, site: Site, detail: str) -> Broken:
        return Broken(promise, site, self.recipe, detail)

    def measured(self) -> list[tuple[Site, float]]:
        """Each site with its rows, and its merit in eval mode."""
        if not self.sites:
            return []
        try:
            with untouched(self.model), in_mode(self.model, False):
                merits = measure(self.model, self.sites, [(self.x, self.y)], loss_fn, norm="frobenius", ratio=False)
        except ZeroMerits:
            return [(site, 0.0) for site in self.sites]
        return [(merit.site, merit.value) for merit in merits]

    def check(self, site: Site, merit: float) -> None:
        """Really wider, and back."""
        state = copy.deepcopy(self.model.state_dict())
        edit = Widening(self.model, site)
        edit.build()
        edit.apply()
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
        self.unchanged(site, state)

    def gradient(self, edit: Widening) -> float:
        """The squared norm of what autograd gives to the new columns."""
        with in_mode(self.model, False):
            self.model.zero_grad()
            loss_fn(self.model(self.x), self.y).backward()
        value = column_gradients(edit)
        self.model.zero_grad()
        return value

    def grown(self, site: Site) -> None:
        """By the verbs, with an optimizer that has stepped, and back to the bit."""
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        with in_mode(self.model, False):
            loss_fn(self.model(self.x), self.y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with untouched(self.model, optimizer):
            undo(self.model, grow(self.model, site, optimizer=optimizer), optimizer=optimizer)

    def unchanged(self, site: Site, state: dict[str, torch.Tensor]) -> None:
        now = self.model.state_dict()
        if list(now) != list(state) or not all(torch.equal(now[key], state[key]) for key in state):
            raise self.fail("undo", site, "the state dict is not what it was")


def check_widths(recipe: Recipe) -> Counter[str]:
    """Raise `Broken` unless every promise is kept at every width; how many sites of which kind there were."""
    recipe.dtype = "float64"
    widths = Widths(recipe)
    for site, merit in widths.measured():
        widths.check(site, merit)
    if widths.sites:
        widths.grown(widths.sites[recipe.seed % len(widths.sites)])
    heads = [getattr(site.move, "heads", 0) for site in widths.sites]
    return Counter(sites=len(heads), heads=sum(map(bool, heads)), refused=len(widths.sites.skipped), models=1)
