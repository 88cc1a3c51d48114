"""A block on its own: copied, called again and again with its arguments, changed in between, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import SensliError
from sensli.modules.arguments import Slot, first_tensor, is_plain, with_value, without_memory
from sensli.modules.copies import copied_block
from sensli.modules.failing import note
from sensli.modules.samples import first_samples
from sensli.moves.trace.flow import Call, Seen
from sensli.moves.trace.surroundings import never_negative

_LARGE = 2**12  # numbers of one sample that are enough for statistics of their own


class NoTwin(SensliError):
    """A block that cannot be made an identity; the text becomes a reason in `Sites.skipped`."""


class BlockTrial:
    """One block, copied, that can be called again and again with its arguments and changed between the calls."""

    def __init__(self, call: Call, seen: Seen, *, null: bool = False) -> None:
        assert call.slot is not None and call.given is not None and call.result is not None
        self.call, self.slot, self.null = call, call.slot, null
        self.block = copied_block(call.module)
        self._verdicts: dict[str, bool] = {}  # by mode, until the block changes again
        # Never chained: somebody's eval() returns None.
        self.block.eval()
        others = with_value(call.args, call.kwargs, self.slot, None)
        self.remembers = not is_plain(others)
        self._others = without_memory(others)
        few = self._reproduce(call.given, call.result)
        generator = torch.Generator().manual_seed(0)
        self._make_general(generator)
        value = seen.tensor.detach()[:few]
        stretched = value * _uniform(value, generator, 0.5, 1.5)  # keeps every sign, so the value of a ReLU stays one
        self.inputs = [value, stretched]
        if not never_negative(seen):
            self.inputs.append(-value)  # nothing proves that values here are never negative, so these must pass too

    def _reproduce(self, given: Seen, result: Seen) -> int:
        """A second call must give what the first gave, or nothing here means anything. How many samples do for the search."""
        count = len(given.tensor) if given.tensor.dim() else 0
        self.args, self.kwargs = self._others
        if given.overwritten or result.overwritten:
            if self.remembers:
                raise NoTwin("works in place on its input and takes a stateful object, so its call cannot be repeated")
            return count
        for few in dict.fromkeys((min(_few(given.tensor), count), count)):
            self.args, self.kwargs = first_samples(self._others, few, count)
            again = self.run(given.tensor.detach()[:few])
            # Not to the bit: some kernels depend on how memory is aligned.
            if again is not None and torch.allclose(again, result.tensor[:few], rtol=1e-4, atol=1e-5):
                return few
        raise NoTwin("is not deterministic (two calls with the same input differ), so a twin cannot be verified")

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
            with torch.set_grad_enabled(graph):
                output = first_tensor(self.block(*args, **kwargs))
        except Exception as error:
            note(error)
            return None
        if output is None or output.shape != value.shape or not torch.isfinite(output).all():
            return None
        return output

    # --- what a state of the block is worth ---

    def is_done(self) -> bool:
        """Whether the block gives its input back, or zero where that is wanted."""
        if "eval" not in self._verdicts:
            self._verdicts["eval"] = all(self._gives_back(value) for value in self.inputs)
        return self._verdicts["eval"]

    def _gives_back(self, value: Tensor) -> bool:
        output = self.run(value)
        return output is not None and torch.equal(output, torch.zeros_like(value) if self.null else value)

    def is_done_in_training(self) -> bool:
        """The same with batch statistics and dropout."""
        if "training" not in self._verdicts:
            self._verdicts["training"] = self._gives_back_in_training()
        return self._verdicts["training"]

    def _gives_back_in_training(self) -> bool:
        buffers = {name: buffer.clone() for name, buffer in self.block.named_buffers()}
        self.block.train()
        try:
            # A batch too small for batch statistics proves nothing either way.
            return self._gives_back(self.inputs[1]) or self.run(self.inputs[1]) is None
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

    def _holds(self) -> bool:
        return self.is_done() and self.is_done_in_training()

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
        self._verdicts.clear()
        return kept

    def _restore(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self.block.get_parameter(name).copy_(value)
        self._verdicts.clear()

    def _replace(self, path: str) -> nn.Module:
        module = self.block.get_submodule(path)
        self._originals.setdefault(path, module)
        self._put(path, nn.Identity())
        return module

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, key = path.rpartition(".")
        self.block.get_submodule(parent)._modules[key] = module
        self._verdicts.clear()

    # --- sizes ---

    def _size(self, paths: list[str]) -> int:
        return sum(p.numel() for path in paths for p in self._originals[path].parameters())

    def _total(self) -> int:
        return sum(value.numel() for value in self._values.values())


class Bound(nn.Module):
    """A block with its other arguments filled in."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], slot: Slot) -> None:
        super().__init__()
        self.block = block
        self._arguments = (args, kwargs, slot)

    def forward(self, value: Tensor) -> Any:
        args, kwargs, slot = self._arguments
        args, kwargs = with_value(args, kwargs, slot, value)
        return self.block(*args, **kwargs)


def _few(value: Tensor) -> int:
    """Samples that show as much as the whole batch, which a block handles one by one as a rule: two for the statistics of a small one."""
    return 1 if value.dim() > 2 and value[0].numel() >= _LARGE else 2


def _uniform(like: Tensor, generator: torch.Generator, low: float, high: float) -> Tensor:
    drawn = torch.rand(like.shape, generator=generator, device=generator.device) * (high - low) + low
    return drawn.to(like.device, like.dtype)
