"""Finding by trial which parameters of a block must be zero for it to be an identity.

The parameters are tried in the order of their distance from the output in the autograd graph, which also sees those whose module's
forward is bypassed. Where no set of zeros does it, modules on the main path (the norm of a post-norm block, a trailing
activation, a shortcut) are replaced by identities in the twin. Equality is to the bit, on several inputs, in eval and in training mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sensli.arguments import first_tensor, is_plain, with_value, without_memory
from sensli.copies import copied_block
from sensli.errors import SensliError
from sensli.flops import count_flops
from sensli.flow import Call, Flow, Seen
from sensli.graph import nearest_parameters, operation, origin
from sensli.running import forked_random_state
from sensli.twins import Twin

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_LOCKS = 3  # how many first choices are taken back before giving up


class NoTwin(SensliError):
    """A block that cannot be made an identity; the text becomes a reason in `Sites.skipped`."""


def find_twin(flow: Flow, call: Call, seen: Seen, hint: Twin | None = None) -> Twin:
    """The plan of a twin of a block for the values seen at its input or its output. ``hint``: the plan of an equal block."""
    trial = _Trial(call, seen)
    if hint is not None and trial.fits(hint):
        return hint
    zeroed, replaced = trial.search(_replaceable(flow, call))
    return Twin(
        block=type(call.module).__name__,
        zeroed=tuple(zeroed),
        replaced=tuple(replaced),
        parameters=sum(p.numel() for p in trial.block.parameters()),
        flops=trial.flops(),
        remembers=trial.remembers,
    )


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


class _Trial:
    """One block, copied, that can be called again and again with its arguments and changed between the calls."""

    def __init__(self, call: Call, seen: Seen) -> None:
        assert call.slot is not None and call.given is not None and call.result is not None
        self.call, self.slot = call, call.slot
        self.block = copied_block(call.module)
        # Never chained: somebody's eval() returns None.
        self.block.eval()
        others = with_value(call.args, call.kwargs, self.slot, None)
        self.remembers = not is_plain(others)
        self.args, self.kwargs = without_memory(others)
        self._reproduce(call.given, call.result)
        generator = torch.Generator().manual_seed(0)
        self._make_general(generator)
        value = seen.tensor.detach()
        stretched = value * _uniform(value, generator, 0.5, 1.5)  # keeps every sign, so a value behind a ReLU stays one
        self.inputs = [value, stretched]
        source = origin(seen.node) if seen.node is not None else None
        if source is None or operation(source) != "Relu" or seen.negative:
            self.inputs.append(-value)  # nothing proves that values here are never negative, so these must pass too

    def _reproduce(self, given: Seen, result: Seen) -> None:
        """A second call must give what the first gave, or nothing here means anything."""
        if given.overwritten or result.overwritten:
            if self.remembers:
                raise NoTwin(
                    "works in place on its input and takes an object with a memory, so its call cannot be repeated"
                )
            return
        again = self.run(given.tensor.detach())
        # Not to the bit: some kernels depend on how memory is aligned.
        if again is None or not torch.allclose(again, result.tensor, rtol=1e-4, atol=1e-5):
            raise NoTwin(
                "gives another output when it is called again with the same arguments (a cache, a counter or noise takes part), so a "
                "copy of it cannot be tried"
            )

    def _make_general(self, generator: torch.Generator) -> None:
        """No parameter may be zero or one by chance of its initialisation: what is trained later would not be."""
        with torch.no_grad():
            for parameter in self.block.parameters():
                if parameter.is_floating_point():
                    spread = parameter.float().std().item() if parameter.numel() > 1 else 0.0
                    size = 0.1 * (spread if 0 < spread < 1 else 1.0)
                    parameter.add_(size * _uniform(parameter, generator, 0.2, 1.0))

    def run(self, value: Tensor, *, graph: bool = False) -> Tensor | None:
        """What the block hands on for a value; None where it fails or gives no number."""
        args, kwargs = with_value(self.args, self.kwargs, self.slot, value.clone())
        try:
            with forked_random_state(self.block), torch.set_grad_enabled(graph):
                output = first_tensor(self.block(*args, **kwargs))
        except Exception:
            return None
        if output is None or output.shape != value.shape or not torch.isfinite(output).all():
            return None
        return output

    # --- what a state of the block is worth ---

    def is_identity(self) -> bool:
        return all((output := self.run(value)) is not None and torch.equal(output, value) for value in self.inputs)

    def is_identity_in_training(self) -> bool:
        """The same with batch statistics, dropout aside: in a zero branch it does no harm, on the main path it is the model's own."""
        buffers = {name: buffer.clone() for name, buffer in self.block.named_buffers()}
        self.block.train()
        for module in self.block.modules():
            if isinstance(module, _DROPOUTS):
                module.training = False
        try:
            # A batch too small for batch statistics proves nothing either way.
            return self.run(self.inputs[1]) is None or self.is_identity()
        finally:
            self.block.eval()
            with torch.no_grad():
                for name, buffer in self.block.named_buffers():
                    buffer.copy_(buffers[name])

    def without_gradient(self, names: list[str]) -> str | None:
        """A zeroed parameter that would get no gradient, if there is one: it could never leave zero."""
        output = self.run(self.inputs[0], graph=True)
        assert output is not None
        generator = torch.Generator().manual_seed(1)
        named = dict(self.block.named_parameters())
        wanted = [named[name].requires_grad_() for name in names]
        loss = (output * _uniform(output, generator, 0.2, 1.0)).sum()
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(names)
        return next((n for n, g in zip(names, gradients, strict=True) if g is None or not g.any()), None)

    def fits(self, twin: Twin) -> bool:
        """Whether an equal block's plan holds here too; the block is left changed if so."""
        names = dict(self.block.named_parameters())
        if any(name not in names for name in twin.zeroed) or twin.remembers != self.remembers:
            return False
        with self._undone() as keep:
            for path in twin.replaced:
                self._replace(path)
            for name in twin.zeroed:
                self._zero(name)
            good = (
                self.is_identity()
                and self.is_identity_in_training()
                and self.without_gradient(list(twin.zeroed)) is None
            )
            keep(good)
        return good

    # --- the search ---

    def search(self, replaceable: list[str]) -> tuple[list[str], list[str]]:
        """Names of parameters to zero and of modules to replace, none of them needless."""
        output = self.run(self.inputs[0], graph=True)
        if output is None or output.grad_fn is None:
            raise NoTwin("does not run on its own output, or no gradient passes through it")
        for parameter in self.block.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        names = {id(p): name for name, p in self.block.named_parameters()}
        order = list(dict.fromkeys(nearest_parameters(names, output.grad_fn, limit=100_000)))
        del output
        problem = (
            "cannot be made an identity by zeroing parameters: it has no connection that passes its input on unchanged"
        )
        locked: set[str] = set()
        for _ in range(_LOCKS):
            with self._undone() as keep:
                zeroed = self._zero_greedily([name for name in order if name not in locked])
                replaced = [] if self._holds() else self._replace_greedily(replaceable, zeroed)
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

    def _holds(self) -> bool:
        return self.is_identity() and self.is_identity_in_training()

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
        """Put identities for the modules that still stand between the input and the output."""
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

    # --- changes that can be taken back ---

    @contextmanager
    def _undone(self) -> Iterator[Any]:
        """Changes made inside are taken back at the end unless they are kept."""
        self._values = {name: p.detach().clone() for name, p in self.block.named_parameters()}
        self._originals: dict[str, nn.Module] = {}
        kept: list[bool] = []
        yield kept.append
        if not (kept and kept[-1]):
            for path in sorted(self._originals, key=lambda path: path.count(".")):  # what contains others first
                self._put(path, self._originals[path])
            for name, value in self._values.items():
                self._restore(name, value)

    def _zero(self, name: str) -> Tensor:
        parameter = self.block.get_parameter(name)
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.zero_()
        return kept

    def _restore(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self.block.get_parameter(name).copy_(value)

    def _replace(self, path: str) -> nn.Module:
        module = self.block.get_submodule(path)
        self._originals.setdefault(path, module)
        self._put(path, nn.Identity())
        return module

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, key = path.rpartition(".")
        self.block.get_submodule(parent)._modules[key] = module

    # --- sizes ---

    def _size(self, paths: list[str]) -> int:
        return sum(p.numel() for path in paths for p in self._originals[path].parameters())

    def _total(self) -> int:
        return sum(value.numel() for value in self._values.values())

    def flops(self) -> int:
        try:
            return int(count_flops(_Bound(self), (self.inputs[0],)))
        except SensliError:
            return 0


class _Bound(nn.Module):
    """A block with its other arguments filled in."""

    def __init__(self, trial: _Trial) -> None:
        super().__init__()
        self.block = trial.block
        self._arguments = (trial.args, trial.kwargs, trial.slot)

    def forward(self, value: Tensor) -> Any:
        args, kwargs, slot = self._arguments
        args, kwargs = with_value(args, kwargs, slot, value)
        return self.block(*args, **kwargs)


def _uniform(like: Tensor, generator: torch.Generator, low: float, high: float) -> Tensor:
    drawn = torch.rand(like.shape, generator=generator) * (high - low) + low
    return drawn.to(like.device, like.dtype)
