"""What `GrowingClassifier` and `GrowingRegressor` share: their settings, the folds, the fit and what it leaves."""

from __future__ import annotations

import copy
import warnings
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.integrations import missing
from sensli.integrations.committee import Committee, networks
from sensli.integrations.fitting import Fit, Plan
from sensli.integrations.folds import Data, Diverged, train_on
from sensli.integrations.stacked import Stacked
from sensli.modules import random_state
from sensli.modules.failing import brief_error
from sensli.surgery.history.history import History

try:
    import numpy as np
    from sklearn.base import BaseEstimator
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import KFold, StratifiedKFold
    from sklearn.utils import check_random_state
    from sklearn.utils._param_validation import Interval
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise missing("sklearn", error) from error

FEWEST = 50  # fewer samples decide nothing: then nothing is held out and nothing grows


def _whole(least: int = 1) -> Any:
    return Interval(Integral, least, None, closed="left")


class GrowingEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share. Inputs are standardised inside, with the mean and deviation of the training data."""

    def __init__(
        self,
        *,
        members: int = 5,
        layers: int = 2,
        width: int = 100,
        max_layers: int = 4,
        max_width: int = 200,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-4,
        batch_size: int = 200,
        max_epochs: int = 500,
        patience: int = 10,
        tolerance: float = 1e-2,
        tau: float = 0.0,
        refit: bool = True,
        warm_start: bool = False,
        device: Any = "cpu",
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.members = members
        self.layers = layers
        self.width = width
        self.max_layers = max_layers
        self.max_width = max_width
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.tolerance = tolerance
        self.tau = tau
        self.refit = refit
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    model_: Committee
    history_: History
    loss_curve_: list[float]
    _classify: ClassVar[bool]

    # What scikit-learn's `_validate_params` checks when fitting begins, before anything changes.
    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "members": [_whole(2)],
        "layers": [_whole()],
        "width": [_whole()],
        "max_layers": [_whole()],
        "max_width": [_whole()],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "weight_decay": [Interval(Real, 0, None, closed="left")],
        "batch_size": [_whole()],
        "max_epochs": [_whole()],
        "patience": [_whole()],
        "tolerance": [Interval(Real, 0, 1, closed="left")],
        "tau": [Interval(Real, 0, None, closed="left")],
        "refit": ["boolean"],
        "warm_start": ["boolean"],
        "device": [str, torch.device],
        "random_state": ["random_state"],
        "verbose": ["verbose"],
    }

    @property
    def _continues(self) -> bool:
        return bool(self.warm_start and hasattr(self, "model_"))

    def _fit(self, x: Any, y: Any, weight: Any, outputs: int) -> None:
        """Train on targets that are numbers already: the indices of classes, or one column for each target."""
        counts = weight > 0
        x, y, weight = x[counts], y[counts], weight[counts]
        random, name = check_random_state(self.random_state), type(self).__name__
        goes_on, device = self._continues, self._device()
        with random_state.kept_of_torch():  # the user's own draws continue as if nothing had been fitted
            random_state.seed_torch(int(random.randint(2**31 - 1)))
            model = copy.deepcopy(self.model_) if goes_on else self._start(x, weight, outputs)
            rows, held_out = self._folds(y, random, len(model.members))
            # The few samples of which none is held out cost nothing in double precision, on the CPU.
            device, precision = (device, torch.float32) if held_out else (torch.device("cpu"), torch.float64)
            data = _data(model, x, y, weight, rows, held_out, precision, device)
            history = History(self.history_, record=self.history_.record.copied()) if goes_on else History()
            history.record.metric = "validation loss" if held_out else "training loss"
            fit = Fit(
                list(model.members.to(device, precision)), data, self._losses,
                self._scores if held_out else self._losses, self._plan(), print if self.verbose else _silent, history,
            )  # fmt: skip
            try:
                fitted = fit.run()
            except Diverged as error:
                raise ValueError(f"{name}: {error}") from error
            # What a warm start continues with must not have seen what its networks hold out.
            if self.refit and not self.warm_start and held_out:
                fit.finish()
        if fitted.stopped:
            warnings.warn(
                f"{name} stopped after max_epochs={self.max_epochs} epochs, while the loss still improved. Increase max_epochs.",
                ConvergenceWarning,
                stacklevel=3,
            )
        self._keep(model, [*self.loss_curve_, *fitted.curve] if goes_on else fitted.curve)
        self.history_, self.validation_loss_ = fitted.history, fitted.loss

    def _partial_fit(self, x: Any, y: Any, weight: Any, outputs: int) -> None:
        """One pass over the samples, without growth; the optimizer continues from call to call."""
        device = self._device()
        with random_state.kept_of_torch():
            random = check_random_state(self.random_state)
            random_state.seed_torch(int(random.randint(2**31 - 1)) + len(getattr(self, "loss_curve_", ())))
            first = not hasattr(self, "model_")
            model = self._start(x, weight, outputs) if first else self.model_
            if not hasattr(self, "_stacked"):
                model.members.float()
                self._stacked = Stacked(list(model.members), self.learning_rate, self.weight_decay)
                model.members.double()
            self._stacked = self._stacked.on(device)
            everything = torch.arange(len(x), device="cpu")
            data = _data(model, x, y, weight, [everything] * len(model.members), [], torch.float32, device)
            try:
                loss = train_on(self._stacked, data, self._losses, self.batch_size)
            except Diverged as error:
                raise ValueError(f"{type(self).__name__}: {error}") from error
            self._stacked.write(self._stacked.average)
        if first:
            self.history_ = History()
        self._keep(model, [*getattr(self, "loss_curve_", ()), loss], self._stacked)

    def _start(self, x: Any, weight: Any, outputs: int) -> Committee:
        members = networks(self.members, [x.shape[1], *[self.width] * self.layers, outputs])
        return Committee(members, *moments(x, weight), classify=self._classify)

    def _keep(self, model: Committee, curve: list[float], stacked: Stacked | None = None) -> None:
        self.model_, self.loss_curve_, self.n_iter_ = model, curve, len(curve)
        # On the CPU, where a pickle of it can be read on any machine, and in double precision, as scikit-learn computes: one sample
        # gives the same alone as among others.
        model.members.cpu().double()
        model.smoothing = self._smoothing  # of this training: networks that continue may have begun with another
        hidden = [layer.out_features for layer in model.members[0].modules() if isinstance(layer, nn.Linear)][:-1]
        self.n_layers_, self.widths_ = len(hidden), tuple(hidden)
        if stacked is None and hasattr(self, "_stacked"):
            del self._stacked  # it belongs to networks that were replaced

    def _validate_params(self) -> None:
        super()._validate_params()
        self._device()

    def _device(self) -> torch.device:
        """Where to train, tried by making something there."""
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(
                f"device must be one that torch finds on this machine for {type(self).__name__}, such as 'cpu', got "
                f"{str(self.device)!r} ({brief_error(error)})."
            ) from None

    def _plan(self) -> Plan:
        return Plan(
            self.learning_rate, self.weight_decay, self.batch_size, self.max_epochs, self.patience, self.tolerance,
            self.max_layers, self.max_width, self.width, self.tau,
        )  # fmt: skip

    def _folds(self, y: Any, random: Any, members: int) -> tuple[list[Tensor], list[Tensor]]:
        """The rows that each network trains on and holds out; below a size all train on all."""
        if len(y) < max(FEWEST, members):
            return [torch.arange(len(y), device="cpu")] * members, []
        alike = self._classify and np.unique(y, return_counts=True)[1].min() >= members
        folds = (StratifiedKFold if alike else KFold)(members, shuffle=True, random_state=random)
        pairs = [(torch.from_numpy(train), torch.from_numpy(rest)) for train, rest in folds.split(y, y)]
        return [train for train, _ in pairs], [rest for _, rest in pairs]

    def _weights(self, sample_weight: Any, x: Any) -> Any:
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        if not (weight > 0).any():
            raise ValueError(f"sample_weight must have a weight above zero for {type(self).__name__}, got only zeros.")
        return weight

    def _output(self, x: Any) -> Tensor:
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, dtype=np.float64)
        with torch.no_grad():
            out: Tensor = self.model_(torch.tensor(x, device="cpu"))  # a copy: what pandas hands out may be read-only
            return out

    @property
    def _smoothing(self) -> float:
        """Of the labels in training."""
        return 0.0

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """What each sample loses in training."""
        raise NotImplementedError

    def _scores(self, output: Tensor, target: Tensor) -> Tensor:
        """What each held-out sample is judged by."""
        raise NotImplementedError


def moments(values: Any, weight: Any) -> tuple[Any, Any]:
    """Weighted mean and deviation of each column; a column that does not vary keeps its scale."""
    mean = np.average(values, axis=0, weights=weight)
    scale = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
    return mean, np.where(scale > 1e-12 * np.maximum(1.0, np.abs(mean)), scale, 1.0)


def _data(
    model: Committee,
    x: Any,
    y: Any,
    weight: Any,
    rows: list[Tensor],
    held_out: list[Tensor],
    precision: torch.dtype,
    device: torch.device,
) -> Data:
    """Standardised as the model does it, on the device to train on."""
    standard = (torch.tensor(x, device="cpu") - model.mean) / model.scale
    target = torch.tensor(y, dtype=precision if np.issubdtype(y.dtype, np.floating) else None, device="cpu")
    weights = torch.tensor(weight, dtype=precision, device="cpu")
    return Data(standard.to(device, precision), target.to(device), weights.to(device), rows, held_out)


def _silent(line: str) -> None:
    pass
