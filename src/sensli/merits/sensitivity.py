"""Catching what a virtual layer needs, in an ordinary pass of the unmodified model.

Identity layers change neither activations nor gradients. So the gradient of a layer that is not there follows from the activation x
at its place and the cotangent g that comes back to it: a forward hook catches x, a hook on the tensor itself catches g.
(`register_full_backward_hook` would raise where the next module works in place.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.merits.caught import SiteCatch, WeightCatch
from sensli.merits.whose import NOWHERE, Mark, Measured, Stepped, task
from sensli.modules.running import tensors, widened
from sensli.modules.wrappers import eager, own_modules
from sensli.moves.factors import Outer
from sensli.moves.move import Gauge, always, as_it_is
from sensli.moves.point import Point
from sensli.moves.sites import Site
from sensli.moves.taps import Watch, handed_on, is_transformed, is_transformed_from, tap
from sensli.moves.trace.activations import CONVOLUTIONS
from sensli.moves.uses import Use, watch_uses


class Catch:
    """All that one measurement catches. Hooks live in `hooked` only, and none survives it, whatever happens inside."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        weights: bool,
        groups: int = 1,
        natural: bool = False,
        gauges: Sequence[Gauge] | None = None,
    ) -> None:
        self.model = model
        self.groups = groups
        self.natural = natural  # the moments of the natural merit are caught too
        self.sites = (
            [SiteCatch(site, groups, model, natural) for site in sites]
            if gauges is None
            else [SiteCatch(site, groups, model, natural, gauge) for site, gauge in zip(sites, gauges, strict=True)]
        )
        # Halves are enough to free the mean over many weights from noise, and groups of all weights would fill the memory.
        self.weights = list(_existing_weights(model, min(groups, 2))) if weights else []
        self.group = 0
        self.keeps_activations = False
        self.watched: list[Tensor] = []  # activations at the sites in the current pass, if they are kept
        self.leaves: list[Tensor] = []  # those after frozen layers, made to ask for a gradient
        self.others = False  # whether tensors that are not parameters ask for a gradient
        self.caught = 0
        self.active = False
        self.around: Callable[[], AbstractContextManager[None]] = (
            nullcontext  # the user's code: autocast, where it is on
        )
        self.scale: Callable[[], float] = lambda: 1.0  # what the loss was multiplied by before its backward pass
        self.whose: Measured | Stepped = Stepped(model)  # which backward passes count
        self.mark = Mark()
        self._refused: dict[str, str] = {}  # sites that a derivative passed which the loss depends on, and in which way
        # Activations whose gradient has not come back yet, and their versions.
        self._waiting: dict[int, tuple[Site, Tensor, int]] = {}

    @contextmanager
    def hooked(self) -> Iterator[Catch]:
        handles: list[Any] = []
        try:
            for catch in self.sites:
                catch.gauge.counts, catch.gauge.marked = self.counts, self._marker(catch.site)
                for index, (point, module) in enumerate(catch.gauge.points):
                    handles.append(tap(point, module, self._watcher(catch, index, point), raw=catch.gauge.raw))
                handles += catch.gauge.hooks(self._arrived(catch), self.unscaled)
            for weight in self.weights:
                if isinstance(weight.owner, CONVOLUTIONS):
                    handles.append(weight.owner.register_forward_pre_hook(_shape_for(weight)))
            if self.natural and self.weights:
                handles.append(self.model.register_forward_hook(self._watch_weights, with_kwargs=True))
            self.active = True
            with ExitStack() as stack:
                stack.enter_context(eager())
                # From the end, so that what comes before keeps its number in a list; and after those that take the model as it is.
                gauges = [catch.gauge for catch in reversed(self.sites)]
                for gauge in (*(one for one in gauges if not one.enters), *(one for one in gauges if one.enters)):
                    stack.enter_context(gauge.inside(self.model))
                yield self
        except BaseException:
            # Hooks in a graph hold this object, and what it kept of a pass that ended early would hold the graph.
            self._waiting.clear()
            self.leaves.clear()
            self.watched.clear()
            raise
        finally:
            self.active = False
            for handle in handles:
                handle.remove()
            for catch in self.sites:  # no circles: what was caught is let go of at once
                catch.gauge.counts, catch.gauge.marked = always, as_it_is

    def _watcher(self, catch: SiteCatch, index: int, point: Point) -> Watch:
        def watch(value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            if is_transformed(value):
                if is_transformed_from(self.model):
                    self._refused[str(catch.site)] = "may depend on a derivative by torch.func or forward mode"
                return value
            asking, watched = handed_on(value, point)
            if asking is not value:  # after frozen layers
                self.leaves.append(asking)
            self._watch(catch, index, value.detach(), watched, args, kwargs)
            if self.keeps_activations:
                # What is overwritten stands for its new value afterwards, and a gradient of that comes from after the point.
                self.watched.append(asking if point.overwritten else watched)
            return watched

        return watch

    def _arrived(self, catch: SiteCatch) -> Callable[[Mapping[str, Tensor | Outer]], None]:
        def add(values: Mapping[str, Tensor | Outer]) -> None:
            if self.counts():
                with torch.no_grad():
                    catch.add(values, self.group)
                self.caught += 1

        return add

    def counts(self, near: Any = None, born: int = NOWHERE) -> bool:
        """Whether the backward pass in progress is one that is measured; the arguments are those of `Measured.counts`."""
        found = self.active and self.whose.counts(near, born)
        if self.whose.supersedes:
            self.whose.supersedes = False
            self._forget()
        return found

    def _watch_weights(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Have what the natural merits of the existing weights need arrive with the backward pass."""
        if not torch.is_grad_enabled() or is_transformed():
            return
        samples = next((len(tensor) for tensor in tensors((args, kwargs)) if tensor.dim()), 1)
        catches = {id(weight.parameter): weight for weight in self.weights}

        def arrived(key: int, use: Use, cotangent: Tensor) -> Tensor:
            if self.counts():
                with torch.no_grad():
                    catches[key].met(use, self.unscaled(cotangent.detach()), samples, self.group)
            return self._marker(catches[key].name)(cotangent)

        nodes = [tensor.grad_fn for tensor in tensors(output)]
        watch_uses(nodes, {key: weight.parameter for key, weight in catches.items()}, arrived)

    @property
    def virtual(self) -> list[Tensor]:
        """Weights that are in the model for the time of the measurement."""
        return [weight for catch in self.sites for weight in catch.gauge.weights]

    def _watch(
        self,
        catch: SiteCatch,
        index: int,
        x: Tensor,
        watched: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        version, key = x._version, id(watched)
        self._waiting[key] = (catch.site, x, version)
        born, caught = task(), catch.gauge.catching(index, x)
        if born != NOWHERE:
            self.counts()  # while that pass can still be asked what it is for
        # What is before it, which does not hold the hook: a node that it held would keep itself alive.
        assert watched.grad_fn is not None
        near = watched.grad_fn.next_functions[0][0]

        def back(cotangent: Tensor | None) -> None:
            if cotangent is None:  # a part of a second derivative that is zero
                self._waiting.pop(key, None)
                return
            if not self.counts(near, born):  # or a pass that began inside the context and ends outside
                return
            if x._version != version:
                raise _overwritten(catch.site)
            self._waiting.pop(key, None)
            # Outside of autocast and in single precision at least: the merit is a sum over all samples and positions.
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                catch.add(caught(x, self.unscaled(cotangent.detach()), args, kwargs), self.group)
            self.caught += 1

        watched.register_hook(back)
        # Where a gradient leaves the place of the site.
        marked = self._marker(catch.site)
        watched.grad_fn.register_hook(lambda cotangents, _: None if cotangents[0] is None else (marked(cotangents[0]),))

    def _marker(self, place: object) -> Callable[[Tensor], Tensor]:
        """From a cotangent that passes a place to the same; if a loss turns out to depend on it, the place is refused."""

        def met(near: Any) -> None:
            if self.counts(near):
                self._refused[str(place)] = "depends on a gradient that your code takes itself"

        # Only with a graph can somebody differentiate it once more.
        return lambda cotangent: self.mark.on(cotangent, met) if self.active and torch.is_grad_enabled() else cotangent

    def check_order(self) -> None:
        """Refuse merits of a loss that depends on a derivative through the sites: they are not products of what was caught."""
        for site, how in self._refused.items():
            raise MeasurementError(
                f"the loss {how} (a gradient penalty, a PINN, forces), and that passes '{site}', so the merit there is not known. Measure "
                "with a loss without that term, or leave out the sites that it passes."
            )

    def _forget(self) -> None:
        """Begin once more: what was caught so far does not count."""
        self.caught = 0
        self._refused.clear()
        for sums in (*(site.sums for site in self.sites), *(weight.sums for weight in self.weights)):
            sums.clear()

    def unscaled(self, gradient: Tensor) -> Tensor:
        """The gradient of the loss itself, where a scaler had multiplied it for the backward pass."""
        scale = self.scale()
        wide: Tensor = widened(gradient)
        return wide if scale == 1.0 else wide / scale

    def forget_pass(self) -> None:
        """Let go of the activations of a pass that is over."""
        waiting, self._waiting = self._waiting, {}
        self.leaves.clear()
        self.watched.clear()
        for site, x, version in waiting.values():  # written through in place, a view loses its gradient without a word
            if x._version != version:
                raise _overwritten(site)

    def add_weight_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Gradients of the existing weights of one batch, in the order of `weights`."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None:
                weight.add(gradient, self.group)


def _overwritten(site: Site) -> MeasurementError:
    return MeasurementError(
        f"the activation of '{site}' was overwritten in place before its gradient arrived, which find_sites did not "
        "see with its example in eval mode. Find the sites with an example like the training data, or leave out inplace=True."
    )


def _existing_weights(model: nn.Module, groups: int) -> Iterator[WeightCatch]:
    """Weights that train: parameters with at least two dimensions; biases and scales are left out as in the merits."""
    seen: set[int] = set()  # a tied weight is one weight
    for path, module in own_modules(model):
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and parameter.ndim >= 2 and id(parameter) not in seen:
                seen.add(id(parameter))
                yield WeightCatch(name, parameter, module, groups)


def _shape_for(weight: WeightCatch) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            axes = weight.parameter.dim() - 2
            weight.shape = tuple(args[0].shape[-axes:])  # from the end: a single sample may come without its batch

    return hook
