"""Finding by trial which parameters of a block must be zero for it to be an identity.

The parameters are tried in the order of their distance from the output in the autograd graph, which also sees those whose module's
forward is bypassed. Where no set of zeros does it, modules on the main path (the norm of a post-norm block, a trailing
activation, a shortcut) are replaced by identities in the twin. Equality is to the bit, on several inputs, in eval and in training mode.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from sensli.errors import SensliError
from sensli.modules import random_state
from sensli.modules.arguments import is_plain, with_value, without_memory
from sensli.modules.flops import count_flops
from sensli.moves.trace.flow import Call, Flow, Seen
from sensli.moves.trace.graph import nearest_parameters
from sensli.moves.twin.block_trial import BlockTrial, Bound, NoTwin
from sensli.moves.twin.twins import Twin

_LOCKS = 3  # how many first choices are taken back before giving up


def find_twin(flow: Flow, call: Call, seen: Seen) -> Twin:
    """The plan of a twin of a block for the values seen at its input or its output, found by trial."""
    with random_state.kept():
        trial = _Search(call, seen)
        zeroed, replaced = trial.search(_replaceable(flow, call))
        return trial.twin(zeroed, replaced)


def find_null(call: Call) -> Twin:
    """The plan of a twin that gives zero, for a loop that adds what its blocks give."""
    assert call.given is not None
    with random_state.kept():
        trial = _Search(call, call.given, null=True)
        return trial.twin(trial.search_null(), [])


def twin_like(call: Call, known: Twin) -> Twin:
    """The plan of an alike block for this one, which may be of another size. It is tried in the model, not here."""
    assert call.given is not None and call.slot is not None
    others = with_value(call.args, call.kwargs, call.slot, None)
    if is_plain(others) == known.remembers:
        raise NoTwin("takes different arguments from the other blocks of the stack")
    return replace(known, parameters=_kept(call.module, known), flops=block_flops(call))


def plain_copy(call: Call) -> Twin:
    """A copy of a block that is not an identity: nothing in it is zero."""
    assert call.slot is not None
    remembers = not is_plain(with_value(call.args, call.kwargs, call.slot, None))
    return Twin(type(call.module).__name__, (), remembers=remembers)


def _kept(block: nn.Module, twin: Twin) -> int:
    """How many parameters a twin has: all of its block's but those of modules that are replaced."""
    gone = [f"{path}." for path in twin.replaced]
    return sum(p.numel() for name, p in block.named_parameters() if not any(name.startswith(path) for path in gone))


def block_flops(call: Call) -> int:
    """FLOPs of one call of a block, per sample; 0 where they cannot be counted."""
    assert call.given is not None and call.slot is not None
    args, kwargs = without_memory(with_value(call.args, call.kwargs, call.slot, None))
    try:
        return int(count_flops(Bound(call.module, args, kwargs, call.slot), (call.given.tensor.detach(),)))
    except SensliError:
        return 0


def _replaceable(flow: Flow, call: Call) -> list[str]:
    """Modules inside a block that map one tensor to one of the same shape, once; the smallest first."""
    inner = [
        c for c in flow.calls if c.path.startswith(f"{call.path}.") and call.began < c.began and c.ended < call.ended
    ]
    paths = [
        c.path
        for c in inner
        if c.slot is not None and c.output is not None and len(c.inputs) == 1 and len(flow.calls_of(c.path)) == 1
    ]
    depth = {path: sum(other.startswith(f"{path}.") for other in paths) for path in paths}
    return [path[len(call.path) + 1 :] for path in sorted(paths, key=lambda path: depth[path])]


class _Search(BlockTrial):
    """Which zeros and identities make a block give its input back."""

    def twin(self, zeroed: list[str], replaced: list[str]) -> Twin:
        """The plan that came of the search; the block has been left as it says."""
        return Twin(
            block=type(self.call.module).__name__,
            zeroed=tuple(zeroed),
            replaced=tuple(replaced),
            parameters=sum(p.numel() for p in self.block.parameters()),
            flops=block_flops(self.call),
            remembers=self.remembers,
            null=self.null,
        )

    def search(self, replaceable: list[str]) -> tuple[list[str], list[str]]:
        """Names of parameters to zero and of modules to replace, none of them needless."""
        order = self._nearest_first()
        problem = (
            "cannot be made an identity by zeroing parameters: it has no connection that passes its input on unchanged"
        )
        locked: set[str] = set()
        for _ in range(_LOCKS):
            with self._undone() as keep:
                zeroed = self._zero_greedily([name for name in order if name not in locked])
                replaced = [] if self._holds() else self._replace_greedily(replaceable, zeroed)
                if (
                    self.is_done() and not self.is_done_in_training()
                ):  # something on the main path rests in eval mode: a dropout
                    replaced += self._replace_resting(replaceable, replaced)
                zeroed = [name for name in zeroed if not any(name.startswith(f"{path}.") for path in replaced)]
                if self._holds():
                    found = self._needed(zeroed, replaced)
                    stuck = self.without_gradient(found[0]) if found[0] else "any"
                    if not found[0]:
                        problem = "is an identity only without all of its parameters, so a twin would learn nothing"
                    elif stuck is not None:
                        problem = (
                            f"is an identity with zeros that get no gradient ({stuck}), so a twin would learn nothing"
                        )
                    elif 2 * self._size(found[1]) >= self._total():
                        problem = "is an identity only if most of it is replaced by identities"
                    else:
                        keep(True)
                        return found
            if not zeroed:
                break
            owner = zeroed[0].rpartition(".")[0]
            locked |= {name for name in order if name.rpartition(".")[0] == owner}
        raise NoTwin(problem)

    def search_null(self) -> list[str]:
        """Names of parameters that make the output zero when they are: the last map, as a rule."""
        zeroed: list[str] = []
        with self._undone() as keep:
            for name in self._nearest_first():
                self._zero(name)
                zeroed.append(name)
                if self._gives_back(self.inputs[0]):
                    break
            if not self._holds():
                raise NoTwin(
                    "does not give zero when its parameters are zero, so a copy of it would change what the loop adds up"
                )
            found, _ = self._needed(zeroed, [])
            stuck = self.without_gradient(found)
            if stuck is not None:
                raise NoTwin(
                    f"gives zero only with zeros that get no gradient ({stuck}), so a twin would learn nothing"
                )
            keep(True)
        return found

    def _nearest_first(self) -> list[str]:
        """The parameters in the order of their distance from the output."""
        for parameter in self.block.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        output = self.run(self.inputs[0], graph=True)
        if output is None or output.grad_fn is None:
            raise NoTwin("does not run on its own output, or no gradient passes through it")
        names = {id(p): name for name, p in self.block.named_parameters()}
        return list(dict.fromkeys(nearest_parameters(names, output.grad_fn, limit=100_000)))

    def _zero_greedily(self, order: list[str]) -> list[str]:
        """Zero one after another what changes the output and leaves it a function of the input."""
        zeroed: list[str] = []
        now = self.run(self.inputs[0])
        for name in order:
            if now is not None and torch.equal(now, self.inputs[0]) and self._holds():
                break
            kept = self._zero(name)
            after = self.run(self.inputs[0])
            if self._is_progress(now, after):
                zeroed.append(name)
                now = after
            else:
                self._restore(name, kept)
        return zeroed

    def _replace_greedily(self, candidates: list[str], zeroed: list[str]) -> list[str]:
        """Put identities for the modules that are still between the input and the output."""
        replaced: list[str] = []
        now = self.run(self.inputs[0])
        for path in candidates:
            own = {f"{path}.{name}" for name, _ in self.block.get_submodule(path).named_parameters()}
            ends_a_branch = bool(own) and own <= set(zeroed)  # an identity there would open the branch again
            if ends_a_branch or any(path.startswith(f"{done}.") or done.startswith(f"{path}.") for done in replaced):
                continue
            module = self._replace(path)
            after = self.run(self.inputs[0])
            if self._is_progress(now, after):
                replaced.append(path)
                now = after
                if self._holds():
                    break
            else:
                self._put(path, module)
        return replaced

    def _replace_resting(self, candidates: list[str], replaced: list[str]) -> list[str]:
        """Put identities for modules without parameters that do nothing in eval mode; what is not needed is taken back later."""
        resting: list[str] = []
        for path in candidates:
            if any(path == done or path.startswith(f"{done}.") for done in (*replaced, *resting)):
                continue
            module = self.block.get_submodule(path)
            if any(True for _ in module.parameters()) or any(True for _ in module.children()):
                continue
            self._replace(path)
            if self.is_done():
                resting.append(path)
            else:
                self._put(path, module)
        return resting

    def _is_progress(self, before: Tensor | None, after: Tensor | None) -> bool:
        """Whether a change shows and the output still depends on the input."""
        if before is None or after is None or torch.equal(before, after):
            return False
        other = self.run(self.inputs[1])
        return other is not None and not torch.equal(after, other)

    def _needed(self, zeroed: list[str], replaced: list[str]) -> tuple[list[str], list[str]]:
        """The block holds as an identity: take back what is not needed for that."""
        for path in list(replaced):
            module = self.block.get_submodule(path)
            self._put(path, self._originals[path])
            for name in self._values:
                if name.startswith(f"{path}."):
                    self._restore(name, self._values[name])
            if self._holds():
                replaced.remove(path)
            else:
                self._put(path, module)
        for name in reversed(list(zeroed)):
            self._restore(name, self._values[name])
            if self._holds():
                zeroed.remove(name)
            else:
                self._zero(name)
        return zeroed, replaced
