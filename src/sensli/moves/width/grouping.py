"""Who makes the units of a width and who reads them: found by marks that pass through a copy of the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sensli.modules.attention import holder_of
from sensli.modules.failing import brief_error, note
from sensli.moves.roles import role_of, why_unknown
from sensli.moves.search import Search
from sensli.moves.width.group import Group
from sensli.moves.width.heads import counts, heads_of, may_be_fused
from sensli.moves.width.marking import Layout, Seen, layout, watch, watch_fused


class Refused(Exception):
    """Why a layer gets no more units."""


class Grouping:
    """The layers of a search in groups that make the same units; those that stay as they are, and why."""

    def __init__(self, search: Search) -> None:
        self.search, self.model, self.copy = search, search.model, search.flow.model
        self.refused: dict[str, str] = {}  # every layer that stays as it is, and why
        self.mixed: dict[str, str] = {}  # layers whose units a module mixes, as it seems without looking for heads

    def refuse(self, paths: Iterable[str], reason: str, what: str = "units") -> None:
        self.refused.update(dict.fromkeys(paths, f"no more {what}: {reason}"))

    def give_up(self, group: Group, reason: str) -> None:
        """Refuse all that make a group, which looked like units or heads and is not known to be."""
        # A single layer whose units are mixed may look like an attention; unless something counts heads, that is a guess.
        guess = len(group.makers) == 1 and not any(count.likely for count in counts(self.model, group))
        if group.heads and group.makers.keys() <= self.mixed.keys():  # a norm over channels looks like one head
            for path in group.makers:
                self.refuse([path], self.mixed[path])
        elif group.heads and guess:
            self.refuse(group.makers, "its units are mixed with each other before they are read")
        else:
            self.refuse(group.makers, reason, "heads" if group.heads else "units")

    def groups(self) -> list[Group]:
        makers = []
        for path, module in self.copy.named_modules():
            role = role_of(module)
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.refuse([path], "a recurrent layer keeps its units in one call, where none can be added alone")
            if why_unknown(module):
                self.refuse([path], why_unknown(module))
            if role is None or not role.makes:
                continue
            if holder_of(self.copy, path) is not None:
                self.refuse([path], "nn.MultiheadAttention reads its weights without calling it")
            elif self.called_once(path):
                makers.append((path, module))
        if not makers:
            return []
        try:
            seen = watch(self.copy, self.search.example, makers)
        except Exception as error:
            note(error)
            self.refuse((path for path, _ in makers), f"the model fails on marked values ({brief_error(error)})")
            return []
        plain: dict[str, Group] = {}
        reasons: dict[str, str] = {}
        for each in seen.values():
            try:
                plain[each.path] = self._of(each)
            except Refused as reason:
                reasons[each.path] = str(reason)
                if each.mixed_by:
                    self.mixed[each.path] = str(reason)
        heads = []
        clusters = [each for each in _read_together(list(seen.values())) if not _is_plain(each, plain)]
        fused = [cluster[0] for cluster in clusters if len(cluster) == 1 and may_be_fused(cluster[0])]
        try:
            watch_fused(self.copy, self.search.example, fused)
        except Exception as error:
            note(error)  # what marks do not tell the trial will
        for cluster in clusters:
            group = self._heads(cluster)
            if group is not None:
                heads.append(group)
                for path in group.makers:
                    plain.pop(path, None)
                    reasons.pop(path, None)
        for path, why in reasons.items():
            self.refuse([path], why)
        return [*heads, *self._joined(list(plain.values()))]

    def called_once(self, path: str, what: str = "units") -> bool:
        calls = len(self.search.flow.calls_of(path))
        if calls != 1:
            times = f"is called {calls} times in one forward pass" if calls else "the forward pass does not call it"
            self.refuse([path], times, what)
        return calls == 1

    def _heads(self, cluster: list[Seen]) -> Group | None:
        """The heads of an attention, if the layers that are read together are one."""
        group = heads_of(cluster)
        if group is None:
            return None
        mixed = any(each.mixed_by for each in cluster)
        alone = len(cluster) == 1 and sum(where.outer for where in group.makers[cluster[0].path]) == 1
        if group.heads > 1 or (group.units > 1 and not (alone and mixed)):
            return group
        # A norm over channels leaves the same marks, but nothing around it is called a number of heads.
        named = any(count.likely for count in counts(self.model, group))
        return group if named and (group.units > 1 or not mixed) else None

    def _of(self, seen: Seen) -> Group:
        if not seen.reads:
            if seen.mixed_by:
                raise Refused(f"its units go into {seen.mixed_by}, which cannot take more of them")
            raise Refused(
                "its output is what the model returns" if seen.leaves else "nothing that is known reads its units"
            )
        if seen.leaves:
            raise Refused("its units are part of what the model returns")
        for groups in (1, 2):
            if seen.units % groups or seen.units // groups < 2:
                continue
            units = seen.units // groups
            reads = {path: layout(units, _by_unit(marks, units)) for path, marks in seen.reads.items()}
            passes = {path: layout(units, _by_unit(marks, units)) for path, marks in seen.passes.items()}
            if all(reads.values()) and all(passes.values()):
                known = Group(units, {seen.path: (Layout(0, groups, 1),)})
                known.reads = {path: where for path, where in reads.items() if where}
                known.passes = {path: where for path, where in passes.items() if where}
                return known
        by = f" by {seen.mixed_by}" if seen.mixed_by else ""
        raise Refused(f"its units are mixed with each other{by} before they are read")

    def _joined(self, groups: list[Group]) -> list[Group]:
        """Layers whose units are added to or multiplied with each other are one width."""
        joined: list[Group] = []
        for group in groups:
            others = [other for other in joined if group.touches(other)]
            if any(not group.agrees(other) for other in others):
                self.refuse(group.makers, "its units are read together with others in a different order")
                for other in others:
                    self.refuse(other.makers, "its units are read together with others in a different order")
                    joined.remove(other)
                continue
            for other in others:
                joined.remove(other)
                group.take(other)
            joined.append(group)
        return joined


def _by_unit(marks: dict[int, frozenset[int]], units: int) -> dict[int, frozenset[int]]:
    """Marks by unit, where several rows of a layer make one; rows that disagree leave no unit at all."""
    found: dict[int, frozenset[int]] = {}
    for row, places in marks.items():
        if found.setdefault(row % units, places) != places:
            return {}
    return found


def _is_plain(cluster: list[Seen], plain: dict[str, Group]) -> bool:
    """Whether layers that are read together make the same single units."""
    groups = [plain[each.path] for each in cluster if each.path in plain]
    return len(groups) == len(cluster) and all(groups[0].agrees(other) for other in groups)


def _read_together(seen: list[Seen]) -> list[list[Seen]]:
    """Layers in clusters whose marks arrive at the same columns."""
    clusters: list[list[Seen]] = []
    for each in seen:
        with_it = [cluster for cluster in clusters if any(_meet(each, other) for other in cluster)]
        clusters = [cluster for cluster in clusters if cluster not in with_it]
        clusters.append([member for cluster in with_it for member in cluster] + [each])
    return clusters


def _meet(one: Seen, other: Seen) -> bool:
    return any(
        max(min(here), min(there)) <= min(max(here), max(there))
        for path in one.reads.keys() & other.reads.keys()
        if (here := set().union(*one.reads[path].values())) and (there := set().union(*other.reads[path].values()))
    )
