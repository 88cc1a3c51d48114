"""The twins of a search: a copy of a block between the blocks of a stack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch import nn

from sensli.moves.search import Refused, Search
from sensli.moves.sites import Site
from sensli.moves.trace.flow import Call, Seen
from sensli.moves.trace.stacks import Stack, is_list, parent_of, signature
from sensli.moves.twin.block_trial import NoTwin
from sensli.moves.twin.finder import TwinFinder
from sensli.moves.twin.twins import Twin


class TwinKind:
    """Copies of blocks."""

    move: ClassVar[type[Twin]] = Twin
    grows: ClassVar[str] = "layers"

    def propose(self, search: Search) -> None:
        if search.request.layer not in ("auto", "twin"):
            return
        self._say_uncalled(search)
        # All twins before any other kind: between two blocks the one may have a twin where the other has none.
        for stack in sorted(search.stacks, key=lambda stack: -len(stack.blocks)):
            if stack.added:
                for block in stack.blocks:
                    assert block.result is not None
                    sites = self._null(search, block, block.result)
                    self._offer(search, block, "after", block.result, stack, sites)
            else:
                for block, side, seen in stack.boundaries():
                    if seen.node not in search.taken:
                        self._offer(search, block, side, seen, stack, self._twin(search, block, side, seen))

    def at(self, search: Search, call: Call, side: str, seen: Seen) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Without blocks there is nothing to copy."""

    def _say_uncalled(self, search: Search) -> None:
        """Lists of blocks that are only holders of their parts: what a person takes for a stack has no block to copy."""
        for path, module in search.flow.model.named_modules():
            if not is_list(module) or len(module._modules) < 2:
                continue
            blocks = dict(module.named_children())
            holder = type(next(iter(blocks.values()))).__name__
            holders = all(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for block in blocks.values())
            called = any(search.flow.calls_of(f"{path}.{name}") for name in blocks)
            kinds = {signature(block) for block in blocks.values()} if holders and not called else ()
            if len(kinds) == 1 and any(True for _ in module.parameters()):
                search.skipped[path] = (
                    f"holds {len(blocks)} blocks that are each a {holder}, of which only the parts are called, so "
                    "nothing can be copied. Give the blocks a class with a forward"
                )

    def _offer(self, search: Search, call: Call, side: str, seen: Seen, stack: Stack, sites: Iterator[Site]) -> None:
        among = (replace(site, _container=stack.container) for site in sites)
        search.offer(call, side, seen, among, quiet=search.request.layer == "auto")

    def _twin(self, search: Search, call: Call, side: str, seen: Seen) -> Iterator[Site]:
        search.check(call, side, seen, block=True)
        chained = search.around.chained(call.path)
        try:
            twin, place = self._finder(search).find(search.flow, call, seen, chained=chained)
        except NoTwin as refusal:
            raise Refused(str(refusal)) from refusal
        point = search.point(call, side, seen, block=True, chained=chained, place=place)
        yield from twin.ways(Site(point, twin))
        yield from search.instead(self, call, side, seen)

    def _null(self, search: Search, call: Call, seen: Seen) -> Iterator[Site]:
        """For a loop that adds what its blocks give; no layer could do that."""
        search.check(call, "after", seen, block=True)
        in_sequential = isinstance(search.model.get_submodule(parent_of(call.path)), nn.Sequential)
        try:
            twin, place = self._finder(search).find_null(search.flow, call, chained=in_sequential)
        except NoTwin as refusal:
            raise Refused(str(refusal)) from refusal
        yield from twin.ways(Site(search.point(call, "after", seen, block=True, chained=True, place=place), twin))

    def _finder(self, search: Search) -> TwinFinder:
        """What was learned on one block is tried first on its equals, also in the next search of the same run."""
        finder: TwinFinder = search.learned.setdefault(self, TwinFinder(search.example, search.request.init))
        return finder
