"""One ordinary pass of the unmodified model for a measurement: a batch in, its loss back to everything that is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.merits.sensitivity import Catch
from sensli.merits.whose import Measured
from sensli.modules.running import describe, device_of, run, taken_by, tensors, to_device
from sensli.moves.trace.graph import leaves

LossFunction = Callable[[Any, Any], Tensor]


def backward(
    model: nn.Module, catch: Catch, batch: Any, loss_fn: LossFunction | None, index: int, unit: float
) -> tuple[int, float]:
    """One batch: its loss, weighted by its size, back through the model. Returns the size and the loss."""
    given, target = split(batch, index, model if loss_fn is not None else None)
    device = device_of(model)
    if any(tensor.is_meta for tensor in tensors((given, target))):
        raise MeasurementError(
            f"batch {index} is on the meta device, where tensors have no values. Give data with values."
        )
    given, target = to_device(given, device), to_device(target, device)
    size = _size(given, batch)
    catch.whose = own_pass = Measured()  # not those that the loss or the model take themselves
    # A dict is keyword arguments; a tuple inside a batch is several arguments.
    with catch.around(), _of_inference(index):
        output = run(model, given)
        loss = _loss(output, target, loss_fn, index)
    virtual = catch.virtual
    own = {id(weight) for weight in virtual}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in own] if catch.weights else []
    # Without the ratio only the activations at the sites are asked for, which leaves out the existing weights' gradients.
    wanted = [*virtual, catch.mark.leaf] + (trained + catch.leaves if catch.weights else list(catch.watched))
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
    try:
        weighted = loss * (size / (unit or size))
        with own_pass.of(weighted):
            gradients = torch.autograd.grad(weighted, wanted, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise MeasurementError(
            "the model checkpoints activations with use_reentrant=True, which allows gradients only through loss.backward(). Set "
            "use_reentrant=False, or use Probe around your own step."
        ) from error
    catch.check_order()
    by_parameter = {id(p): g for p, g in zip(wanted, gradients, strict=True)}
    catch.add_weight_gradients(by_parameter[id(weight.parameter)] for weight in catch.weights)
    catch.forget_pass()
    return size, float(loss.detach())


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


def split(batch: Any, index: int, model: nn.Module | None) -> tuple[Any, Any]:
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


def _size(given: Any, batch: Any) -> int:
    for tensor in tensors((given, batch)):
        if tensor.dim() > 0:
            if tensor.shape[0] == 0:
                break
            return int(tensor.shape[0])
    raise MeasurementError(
        f"a batch ({describe(batch)}) contains no samples: its first tensor with a dimension is empty, or there is no such tensor. "
        "Leave the batch out."
    )


def _loss(output: Any, target: Any, loss_fn: LossFunction | None, index: int) -> Tensor:
    """The mean loss of a batch, checked to be a finite scalar."""
    loss = scalar_loss(output, target, loss_fn, index)
    if not torch.isfinite(loss):
        raise MeasurementError(
            f"the loss of batch {index} is {loss.item()}: training has diverged or the batch contains bad values, "
            "so merits would be meaningless. Lower the learning rate or check the data."
        )
    return loss


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
