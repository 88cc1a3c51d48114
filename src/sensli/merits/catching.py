"""Catching what a virtual layer needs: in one ordinary pass of the unmodified model, at every site and every existing weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sensli.errors import MeasurementError
from sensli.merits.norms import sketcher_for
from sensli.merits.sums import Catches, SiteCatch, WeightCatch, existing_weights
from sensli.modules.engines.distributed import ShardedPass, Together, ended_by_others
from sensli.modules.engines.fsdp import divisors, whole_leaves
from sensli.modules.running import describe, device_of, gradients_kept, run, taken_by, tensors, to_device, upcast
from sensli.modules.wrappers import run_eagerly
from sensli.moves.factors import Outer, Use, watch_uses
from sensli.moves.point import Point, Watch, handed_on, is_transformed, is_transformed_from, tap
from sensli.moves.roles import CONVOLUTIONS
from sensli.moves.sites import Gauge, Site, always, as_it_is
from sensli.moves.trace.graph import leaves, operation

# ---- Whose backward pass a hook is called in: the one that is measured, or another one that the user's code takes by
# itself.
#
# A loss or a forward method may take a gradient (a gradient penalty, forces, an adversarial example). Its backward
# pass calls the same hooks, and is not what a merit is made of. Where the loss depends on such a gradient, the
# gradient of something new is more than one product of an activation and a cotangent: `marked` tells.


NOWHERE = -1  # the number of the backward pass in progress where there is none


def task() -> int:
    """The number of the backward pass in progress."""
    number: int = torch._C._current_graph_task_id()
    return number


class Measured:
    """Only the backward pass that the measurement itself takes counts."""

    supersedes = False

    def __init__(self) -> None:
        self._own: int | None = None

    @contextmanager
    def of(self, loss: Tensor) -> Iterator[None]:
        """The pass that begins at this loss, as long as the context lasts."""

        def begins(cotangent: Tensor) -> None:
            self._own = task()

        loss.register_hook(begins)
        try:
            yield
        finally:
            self._own = None

    def counts(self, near: Any, born: int = NOWHERE) -> bool:
        """Whether the pass in progress does; ``born``: the one in which the forward pass was made once more, as for a checkpoint.

        ``near``: an operation before the one that the hook belongs to, or None.
        """
        return self._own is not None and (born != NOWHERE or task() == self._own)


class Stepped:
    """The backward passes of the user's own step: what they add to ``.grad`` is what counts.

    ``torch.autograd.grad`` counts where it is asked for gradients of the model's parameters and nobody calls ``backward()``. If somebody
    does later, the pass in progress ``supersedes`` what was counted before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.supersedes = model, False
        # By the number of a pass: whether it adds to .grad; None if it asks for nothing of ours.
        self._adds: dict[int, bool | None] = {}
        self._taken = self._asked = False

    def counts(self, near: Any, born: int = NOWHERE) -> bool:
        """As in `Measured`."""
        number = task()
        if number not in self._adds:
            self._adds[number] = self._kind(near)
        # What is computed once more inside of a backward pass, and goes back there, is part of that one.
        adds = self._adds[number] or (self._adds[number] if born == NOWHERE else self._adds.get(born))
        if adds and not self._taken:
            self._taken, self.supersedes = True, self._asked
        self._asked = self._asked or adds is False
        return adds or (adds is False and not self._taken)

    def _kind(self, near: Any) -> bool | None:
        node = near
        while node is not None and node.next_functions:
            node = next((before for before, _ in node.next_functions if before is not None), None)
        found = None if node is None else _asks(node)
        if found:
            return True
        for parameter in self._model.parameters():
            found = _asks(get_gradient_edge(parameter).node) if parameter.requires_grad else None
            if found is not None:
                return found
        return None


def _asks(leaf: Any) -> bool | None:
    """Of the pass in progress whether it adds to the gradient of a leaf (True), only returns it (False), or does neither."""
    try:
        return True if torch._C._will_engine_execute_node(leaf) else None
    except RuntimeError:  # torch's way to say that the leaf is one of the inputs of autograd.grad
        return False


class _Marked(torch.autograd.Function):
    """The same cotangent of a pass that builds a graph; ``met`` is called, with a node near by, when a later one comes back to it."""

    @staticmethod
    def forward(ctx: Any, cotangent: Tensor, leaf: Tensor, met: Callable[[Any], None]) -> Tensor:
        ctx.leaf, ctx.met = leaf, met
        return cotangent.view_as(cotangent)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (cotangent,) = cotangents
        ctx.met(get_gradient_edge(ctx.leaf).node)
        if torch.is_grad_enabled():  # second derivatives, which a loss may depend on too
            cotangent = _Marked.apply(cotangent, ctx.leaf, ctx.met)  # type: ignore[no-untyped-call]
        return cotangent, None, None


# ---- All hooks of one measurement.
#
# Identity layers change neither activations nor gradients. So the gradient of a layer that is not there follows from
# the activation x at its place and the cotangent g that comes back to it: a forward hook catches x, a hook on the
# tensor itself catches g. (`register_full_backward_hook` would raise where the next module works in place.)


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
        sketched: bool = False,
        sharded: bool = False,
    ) -> None:
        """``sketched``: sketches are summed where gradients are too large for that, which is for the Frobenius norm alone."""
        self.model = model
        self.groups = groups
        self.natural = natural  # the moments of the natural merit are caught too
        given = [None] * len(sites) if gauges is None else gauges
        self.sites = [SiteCatch(site, groups, model, natural, own) for site, own in zip(sites, given, strict=True)]
        # Halves are enough to free the mean over many weights from noise, and groups of all weights would fill the memory.
        divided = divisors(model) if sharded and weights else {}
        self.weights = list(existing_weights(model, min(groups, 2), divided)) if weights else []
        self.sharded = sharded
        known = {id(weight.parameter) for weight in self.weights}
        self._unmeasured = [p for p in model.parameters() if id(p) in divided and id(p) not in known]
        # Without groups the sums of the weights take what a backward pass does, and shards less.
        large: list[Catches] = [*self.sites, *(self.weights if groups > 1 and not sharded else ())]
        entries = sum(each.gauge.entries for each in self.sites) * (groups + 1 if groups > 1 else 1)
        entries += sum(3 * weight.parameter.numel() for weight in self.weights if groups > 1)
        self.sketcher = sketcher_for(entries, groups > 1) if sketched else None
        for each in large:
            each.sketch_by(self.sketcher)
        self.group = 0
        self.keeps_activations = False
        self.watched: list[Tensor] = []  # activations at the sites in the current pass, if they are kept
        self.leaves: list[Tensor] = []  # those after frozen layers, made to ask for a gradient
        self.others = False  # whether tensors that are not parameters ask for a gradient
        self.caught = 0
        self.active = False
        self.ranks: Together | None = None  # the processes of a sharded model, which make each pass at once
        self.idle = False  # this process runs along with others, and what it catches does not count
        # Around the user's code: autocast, where it is on.
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.scale: Callable[[], float] = lambda: 1.0  # what the loss was multiplied by before its backward pass
        self.whose: Measured | Stepped = Stepped(model)  # which backward passes count
        # To be asked for with the gradients of the loss: otherwise autograd leaves out the way to where nothing else is that tells
        # whether the loss depends on a gradient that somebody took before.
        self.mark = torch.zeros((), requires_grad=True, device="cpu")
        self._refused: dict[str, str] = {}  # sites that a derivative passed which the loss depends on, and in which way
        # Activations whose gradient has not come back yet, and their versions.
        self._waiting: dict[int, tuple[Site, Tensor, int]] = {}
        # Of the pass in progress: what they are given may be the very tensors that hold them, which nobody would let go of.
        self._hooks: list[Any] = []

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
                    handles.append(weight.owner.register_forward_pre_hook(weight.see_input))
            if self.natural and self.weights:
                handles.append(self.model.register_forward_hook(self._watch_weights, with_kwargs=True))
            self.active = True
            with ExitStack() as stack:
                stack.enter_context(run_eagerly())
                # From the end, so that what comes before keeps its number in a list; and after those that take the model as it is.
                gauges = [catch.gauge for catch in reversed(self.sites)]
                for gauge in (*(one for one in gauges if not one.enters), *(one for one in gauges if one.enters)):
                    stack.enter_context(gauge.inside(self.model))
                yield self
        except BaseException:
            # Hooks in a graph hold this object, and what it kept of a pass that ended early would hold the graph.
            self._let_go()
            raise
        finally:
            self.active = False
            for handle in handles:
                handle.remove()
            for catch in self.sites:  # no circles: what was caught is let go of at once
                catch.gauge.counts, catch.gauge.marked = always, as_it_is

    def _watcher(self, catch: SiteCatch, index: int, point: Point) -> Watch:
        marked = self._marker(catch.site)

        def watch(value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            if is_transformed(value):
                if is_transformed_from(self.model):
                    self._refused[str(catch.site)] = "may depend on a derivative by torch.func or forward mode"
                return value
            asking, watched = handed_on(value, point)
            if asking is not value:  # after frozen layers
                self.leaves.append(asking)
            if self.keeps_activations:
                # What is overwritten stands for its new value afterwards, and a gradient of that comes from after the point.
                self.watched.append(asking if point.overwritten else watched)
            x, key = value.detach(), id(watched)
            version = x._version
            self._waiting[key] = (catch.site, x, version)
            born, caught = task(), catch.gauge.catching(index, x)
            if born != NOWHERE:
                self.counts()  # while that pass can still be asked what it is for
            # What is before it, which does not hold the hook: a node that it held would keep itself alive.
            assert watched.grad_fn is not None
            near = watched.grad_fn.next_functions[0][0]

            def take(cotangent: Tensor) -> None:
                # Outside of autocast and in single precision at least: the merit is a sum over all samples and positions.
                with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                    sums = caught(x, self.unscaled(cotangent.detach()), args, kwargs)
                    catch.add({} if self.idle else sums, self.group)
                self.caught += 1

            wait = _rectified(x, near, take, self._hooks) if catch.gauge.rectified else take

            def back(cotangent: Tensor | None) -> None:
                if cotangent is None:  # a part of a second derivative that is zero
                    self._waiting.pop(key, None)
                    return
                if not self.counts(near, born):  # or a pass that began inside the context and ends outside
                    return
                if x._version != version:
                    raise _overwritten(catch.site)
                self._waiting.pop(key, None)
                wait(cotangent)

            self._hooks.append(watched.register_hook(back))
            # Where a gradient leaves the place of the site.
            watched.grad_fn.register_hook(lambda given, _: None if given[0] is None else (marked(given[0]),))
            return watched

        return watch

    def _arrived(self, catch: SiteCatch) -> Callable[[Mapping[str, Tensor | Outer]], None]:
        def add(values: Mapping[str, Tensor | Outer]) -> None:
            if self.counts():
                with torch.no_grad():
                    catch.add({} if self.idle else values, self.group)
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

    def _marker(self, place: object) -> Callable[[Tensor], Tensor]:
        """From a cotangent that passes a place to the same; if a loss turns out to depend on it, the place is refused."""

        def met(near: Any) -> None:
            if self.counts(near):
                self._refused[str(place)] = "depends on a gradient that your code takes itself"

        def marked(cotangent: Tensor) -> Tensor:
            if self.active and torch.is_grad_enabled():  # only with a graph can somebody differentiate it once more
                cotangent = _Marked.apply(cotangent, self.mark, met)  # type: ignore[no-untyped-call]
            return cotangent

        return marked

    def check_order(self) -> None:
        """Refuse merits of a loss that depends on a derivative through the sites: they are not products of what was caught."""
        for site, how in self._refused.items():
            raise MeasurementError(
                f"the loss {how} (a gradient penalty, a PINN, forces), and that passes '{site}', so the merit there is not known. Measure "
                "with a loss without that term, or leave out the sites that it passes."
            )

    def begin_again(self) -> None:
        """For another step of the user's: what was caught so far belongs to those before it."""
        self.whose = Stepped(self.model)
        self.caught = 0
        for each in (*self.sites, *self.weights):
            each.forget()

    def _forget(self) -> None:
        """Begin once more: what was caught so far does not count."""
        self.caught = 0
        self._refused.clear()
        for each in (*self.sites, *self.weights):
            each.forget()

    def unscaled(self, gradient: Tensor) -> Tensor:
        """The gradient of the loss itself, where a scaler had multiplied it for the backward pass."""
        scale = self.scale()
        wide: Tensor = upcast(gradient)
        return wide if scale == 1.0 else wide / scale

    def forget_pass(self) -> None:
        """Let go of the activations of a pass that is over."""
        waiting = self._waiting
        self._let_go()
        for site, x, version in waiting.values():  # written through in place, a view loses its gradient without a word
            if x._version != version:
                raise _overwritten(site)

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._waiting = {}
        self.leaves.clear()
        self.watched.clear()

    @contextmanager
    def taking_weight_gradients(self) -> Iterator[None]:
        """Gradients of the existing weights go to their sums one by one as they arrive, and are not held beside them."""

        def hook(weight: WeightCatch) -> Callable[[Tensor], bool]:
            def take(gradient: Tensor) -> bool:
                counts = weight.joined or self.counts()  # FSDP2 hands on the last ones when the pass is over
                if counts:
                    with torch.no_grad():
                        weight.add_gradient(self.unscaled(gradient), self.group)
                return counts

            return take

        with ExitStack() as stack:
            for weight in self.weights:
                if weight.parameter.requires_grad:
                    stack.callback(weight.watch(hook(weight), drop=True).remove)
            for (
                parameter
            ) in self._unmeasured:  # FSDP2 has the shards of a block in one tensor, which each of them would hold
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
                    stack.callback(handle.remove)
            yield


def _rectified(x: Tensor, near: Any, take: Callable[[Tensor], None], hooks: list[Any]) -> Callable[[Tensor], None]:
    """Take cotangents with zeros wherever the activation is not positive.

    A ReLU right before the place makes the same of them: where the backward pass comes there anyway, that is waited for.
    """
    held: list[Tensor] = []
    while operation(near) == "View":  # what else is measured at the place
        near = near.next_functions[0][0]
    # Of the ReLU itself it would not do to ask: a pass that wants its cotangent alone ends before it.
    before = near.next_functions[0][0] if operation(near) == "Relu" and type(x) is Tensor else None

    def arrived(cotangent: Tensor) -> None:
        if before is not None and _asks(before) is not None:
            held[:] = [cotangent]
        else:
            take(torch.ops.aten.threshold_backward(cotangent, x, 0))

    def passed(after: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        if held:
            mine = held.pop()
            # Whoever else read the value has added to it, elsewhere: this one is held.
            here, there = ((each.data_ptr(), each.shape, each.stride()) for each in (mine, given[0]))
            take(after[0] if here == there else torch.ops.aten.threshold_backward(mine, x, 0))

    if before is not None:
        hooks.append(near.register_hook(passed))
    return arrived


def _overwritten(site: Site) -> MeasurementError:
    return MeasurementError(
        f"the activation of '{site}' was overwritten in place before its gradient arrived, which find_sites did not "
        "see with its example in eval mode. Find the sites with an example like the training data, or leave out inplace=True."
    )


# ---- One ordinary pass for a measurement: a batch in, its loss back to everything that is watched.


LossFunction = Callable[[Any, Any], Tensor]


def backward(
    model: nn.Module, catch: Catch, batch: Any, loss_fn: LossFunction | None, index: int, unit: float
) -> tuple[int, float]:
    """One batch: its loss, weighted by its size, back through the model. Returns the size and the loss."""
    catch.whose = own_pass = Measured()  # not those that the loss or the model take themselves
    # What fails in one process before its backward pass ends the pass in all of them.
    with Together(None, "run the model") if catch.ranks is None else ShardedPass(model) as together:
        size, loss = _forward(model, catch, batch, loss_fn, index)
        wanted = _wanted(model, catch, loss, index)
        together.agree()
    try:
        weighted = loss * (0.0 if catch.idle else size / (unit or size))
        with own_pass.of(weighted), catch.taking_weight_gradients():
            if catch.sharded and catch.weights:
                with gradients_kept(wanted):  # it adds to them, where FSDP2 looks for what it sums
                    torch.autograd.backward(weighted, inputs=wanted)
            else:
                torch.autograd.grad(weighted, wanted, allow_unused=True)
    except RuntimeError as error:
        gone = None if catch.ranks is None else ended_by_others("run the model", error)
        if gone is not None:
            raise gone from error
        if "use_reentrant" not in str(error):
            raise
        raise MeasurementError(
            "the model checkpoints activations with use_reentrant=True, which allows gradients only through loss.backward(). Set "
            "use_reentrant=False, or use Probe around your own step."
        ) from error
    catch.check_order()
    catch.forget_pass()
    return size, float(loss.detach())


def _forward(
    model: nn.Module, catch: Catch, batch: Any, loss_fn: LossFunction | None, index: int
) -> tuple[int, Tensor]:
    """The size of a batch, and its loss."""
    given, target = split_batch(batch, index, model if loss_fn is not None else None)
    device = device_of(model)
    if any(tensor.is_meta for tensor in tensors((given, target))):
        raise MeasurementError(
            f"batch {index} is on the meta device, where tensors have no values. Give data with values."
        )
    given, target = to_device(given, device), to_device(target, device)
    size = samples_of((given, batch))
    if not size:
        raise MeasurementError(
            f"a batch ({describe(batch)}) contains no samples: its first tensor with a dimension is empty, or there is no such tensor. "
            "Leave the batch out."
        )
    # A dict is keyword arguments; a tuple inside a batch is several arguments.
    with catch.around(), _of_inference(index):
        output = run(model, given)
        loss = scalar_loss(output, target, loss_fn, index)
    if not torch.isfinite(loss):
        raise MeasurementError(
            f"the loss of batch {index} is {loss.item()}: training has diverged or the batch contains bad values, "
            "so merits would be meaningless. Lower the learning rate or check the data."
        )
    return size, loss


def _wanted(model: nn.Module, catch: Catch, loss: Tensor, index: int) -> list[Tensor]:
    """What the backward pass is asked for."""
    virtual = [weight for site in catch.sites for weight in site.gauge.weights]  # in the model for this time only
    own = {id(weight) for weight in virtual}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in own] if catch.weights else []
    if catch.sharded:
        trained = [p for p in trained if not hasattr(p, "full_tensor")] + (whole_leaves(model) if catch.weights else [])
    # Without the ratio only the activations at the sites are asked for, which leaves out the existing weights' gradients.
    wanted = [*virtual, catch.mark] + (trained + catch.leaves if catch.weights else list(catch.watched))
    if catch.weights and loss.grad_fn is not None and (index == 0 or catch.others):
        # A model or its input may hold tensors that require a gradient and are not parameters. Unless they are asked for too,
        # autograd leaves out the way to them, and the sites on that way would seem worthless.
        known = {id(tensor) for tensor in wanted}
        others = [leaf for leaf in leaves(loss.grad_fn) if id(leaf) not in known]
        catch.others, wanted = bool(others), wanted + others
    if len(wanted) == 1 or not loss.requires_grad:
        raise MeasurementError(
            f"the loss of batch {index} does not depend on any site: no gradient arrives. Check that loss_fn uses the model's output "
            "and that nothing detaches it."
        )
    return wanted


@contextmanager
def _of_inference(index: int) -> Iterator[None]:
    """What torch says of tensors that were made in inference mode, with the place and the remedy."""
    try:
        yield
    except RuntimeError as error:
        if "inference tensor" not in str(error).lower():
            raise
        raise MeasurementError(
            f"batch {index} or the model has tensors that were made under torch.inference_mode(), and no gradient passes them. Make them "
            "outside of it, or give copies: x.clone()."
        ) from error


def split_batch(batch: Any, index: int, model: nn.Module | None) -> tuple[Any, Any]:
    """What the model is called with, and the target: of a dict those keys that the model takes, and all of it.

    Without a model, where nobody else has a use for the other keys, all of them go to it.
    """
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        keys = dict(batch)
        given = taken_by(model, keys) if model is not None else keys
        if keys and not given:
            raise MeasurementError(
                f"batch {index} has the keys {', '.join(map(repr, keys))}, but forward of {type(model).__name__} takes none of them. "
                "Name the keys like its arguments, or give (input, target) pairs."
            )
        return given, batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise MeasurementError(
        f"batch {index} is {describe(batch)}, but batches must yield (input, target) pairs or dicts. To measure on a single batch "
        "give [(x, y)]."
    )


def samples_of(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor that has a dimension."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 0)


def scalar_loss(output: Any, target: Any, loss_fn: LossFunction | None, index: int) -> Tensor:
    """The mean loss of a batch, checked to be a scalar. The target goes where the output is: a model may lie on several devices."""
    made = next(tensors(output), None)
    target = target if made is None else to_device(target, made.device)
    loss = loss_fn(output, target) if loss_fn is not None else getattr(output, "loss", None)
    if loss is None and loss_fn is None:
        raise MeasurementError(
            "loss_fn is missing, and the model's output has no .loss. Give loss_fn(output, target) -> mean loss."
        )
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise MeasurementError(
            f"the loss of batch {index} has {what}, not a scalar tensor. loss_fn must return the mean over the batch "
            "(for torch losses reduction='mean')."
        )
    if loss.is_complex():
        raise MeasurementError(
            f"the loss of batch {index} is a complex number ({loss.dtype}), which cannot be minimised. loss_fn must return a real one, for "
            "example its .abs()."
        )
    return loss
