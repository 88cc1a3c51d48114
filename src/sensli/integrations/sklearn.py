"""`GrowingClassifier` and `GrowingRegressor`: scikit-learn estimators with no architecture to choose.

`fit` starts with one hidden layer, inserts layers where they are worth most while a held-out part improves, and stops by itself. Then
it trains again on all samples, through the epochs and insertions that proved best (``refit=False`` leaves that out).
"""

from __future__ import annotations

import copy
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from sensli.integrations import missing
from sensli.integrations.fitting import Data, Plan, fit_again, fit_growing

try:
    import numpy as np
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils._param_validation import Interval
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise missing("sklearn", error) from error

FEWEST_HELD_OUT = 10  # fewer samples decide nothing: then all are used for training, and the loss is the training loss


def _whole() -> Any:
    return Interval(Integral, 1, None, closed="left")


class _Growing(BaseEstimator):  # type: ignore[misc]
    """What both estimators share. Inputs are standardised inside, with the mean and deviation of the training data."""

    def __init__(
        self,
        *,
        width: int = 100,
        max_layers: int = 8,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-4,
        batch_size: int = 200,
        max_epochs: int = 2000,
        validation_fraction: float = 0.1,
        patience: int = 10,
        tolerance: float = 1e-3,
        tau: float = 0.0,
        refit: bool = True,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.width = width
        self.max_layers = max_layers
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.tolerance = tolerance
        self.tau = tau
        self.refit = refit
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    model_: nn.Sequential

    # What scikit-learn's `_validate_params` checks when fitting begins, before anything changes.
    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "width": [_whole()],
        "max_layers": [_whole()],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "weight_decay": [Interval(Real, 0, None, closed="left")],
        "batch_size": [_whole()],
        "max_epochs": [_whole()],
        "validation_fraction": [Interval(Real, 0, 1, closed="left")],
        "patience": [_whole()],
        "tolerance": [Interval(Real, 0, 1, closed="left")],
        "tau": [Interval(Real, 0, None, closed="left")],
        "refit": ["boolean"],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
        "verbose": ["verbose"],
    }

    def _fit(self, x: Any, y: Any, sample_weight: Any, outputs: int, groups: Any = None) -> None:
        """Train on targets that are tensors already; ``groups`` are the classes to hold out in equal proportions."""
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        counts = weight > 0
        if not counts.any():
            raise ValueError("all sample weights are zero, so there is nothing to fit.")
        x, y, weight = x[counts], y[counts], weight[counts]
        random = check_random_state(self.random_state)
        held_out = int(self.validation_fraction * len(x))
        if held_out >= FEWEST_HELD_OUT:
            rows = np.arange(len(x))
            alike = (
                None if groups is None or np.unique(groups[counts], return_counts=True)[1].min() < 2 else groups[counts]
            )
            alike = None if alike is not None and len(np.unique(alike)) > held_out else alike
            chosen, others = train_test_split(rows, test_size=held_out, stratify=alike, random_state=random)
        else:
            chosen = others = slice(None)
        plan = Plan(
            self.learning_rate, self.weight_decay, self.batch_size, self.max_epochs, self.patience, self.tolerance,
            self.max_layers - 1, self.tau,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):  # the user's own draws continue as if nothing had been fitted
            torch.manual_seed(int(random.randint(2**31 - 1)))
            if not (self.warm_start and hasattr(self, "model_")):
                self.model_ = _network(x[chosen], weight[chosen], self.width, outputs)
            start, say = copy.deepcopy(self.model_), print if self.verbose else _silent
            train, rest = (_data(x[part], y[part], weight[part]) for part in (chosen, others))
            # What a warm start continues with must not have seen the held-out part, which decides there too.
            again = self.refit and not self.warm_start and held_out >= FEWEST_HELD_OUT
            fitted = fit_growing(self.model_, train, rest, self._loss, plan, say)
            if again:
                self.model_ = start
                self.model_[0] = _Standardize(*_moments(x, weight)).double()
                say(f"again on all {len(x)} samples: {' + '.join(map(str, fitted.way))} epochs")
                fit_again(self.model_, _data(x, y, weight), self._loss, plan, fitted)
        self.history_ = fitted.history
        self.validation_loss_ = fitted.loss
        self.n_iter_ = fitted.epochs
        self.n_layers_ = sum(isinstance(module, nn.Linear) for module in self.model_.modules()) - 1

    def _output(self, x: Any) -> Tensor:
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, dtype=np.float64)
        with torch.no_grad():
            out: Tensor = self.model_(torch.from_numpy(x))
            return out

    @staticmethod
    def _loss(output: Tensor, rest: Any) -> Tensor:
        raise NotImplementedError


class GrowingClassifier(ClassifierMixin, _Growing):  # type: ignore[misc]
    """A classifier that grows its network during `fit`.

    Args:
        width: The number of units of each hidden layer (default: 100).
        max_layers: The largest number of hidden layers; `fit` starts with one (default: 8).
        learning_rate: The learning rate of AdamW (default: 3e-3).
        weight_decay: The decoupled weight decay (default: 1e-4).
        batch_size: The number of samples in a batch (default: 200).
        max_epochs: The largest number of epochs (default: 2000).
        validation_fraction: The share of the samples that is held out to decide when to grow and to stop (default: 0.1).
        patience: The number of evaluations of the held-out part without an improvement before growing or stopping (default: 10).
        tolerance: The smallest relative improvement that counts (default: 1e-3).
        tau: The threshold of `sensli.Grower` (default: 0.0).
        refit: Whether to train again on all samples, through the epochs and insertions that were best (default: True).
        warm_start: Whether the next `fit` continues with the network of the last one (default: False).
        random_state: The random seed, or a numpy RandomState.
        verbose: Whether to print what happens (default: 0).
    """

    classes_: Any

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GrowingClassifier:
        """Fit the network.

        Args:
            X: The samples, of shape (n, features).
            y: The labels, of shape (n,).
            sample_weight: The weight of each sample. None weights all equally.

        Returns:
            The estimator itself.
        """
        self._validate_params()
        first = not (self.warm_start and hasattr(self, "model_"))
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        check_classification_targets(y)
        classes, index = np.unique(y, return_inverse=True)
        if not first and not np.array_equal(classes, self.classes_):
            raise ValueError(f"warm_start=True continues with the classes {self.classes_}, but y contains {classes}.")
        self.classes_ = classes
        self._fit(X, index, sample_weight, max(2, len(classes)), groups=index)
        return self

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, in the order of ``classes_``.

        Args:
            X: The samples, of shape (n, features).
        """
        output = self._output(X)
        return softmax(output[:, : len(self.classes_)], dim=1).numpy()

    def predict(self, X: Any) -> Any:
        """The most probable class of each sample.

        Args:
            X: The samples, of shape (n, features).
        """
        output = self._output(X)
        return self.classes_[output[:, : len(self.classes_)].argmax(1).numpy()]

    @staticmethod
    def _loss(output: Tensor, rest: Any) -> Tensor:
        target, weight = rest
        loss: Tensor = (cross_entropy(output, target, reduction="none") * weight).mean()
        return loss


class GrowingRegressor(RegressorMixin, _Growing):  # type: ignore[misc]
    """A regressor that grows its network during `fit`; targets are standardised inside, so their unit does not matter.

    Args:
        width: The number of units of each hidden layer (default: 100).
        max_layers: The largest number of hidden layers; `fit` starts with one (default: 8).
        learning_rate: The learning rate of AdamW (default: 3e-3).
        weight_decay: The decoupled weight decay (default: 1e-4).
        batch_size: The number of samples in a batch (default: 200).
        max_epochs: The largest number of epochs (default: 2000).
        validation_fraction: The share of the samples that is held out to decide when to grow and to stop (default: 0.1).
        patience: The number of evaluations of the held-out part without an improvement before growing or stopping (default: 10).
        tolerance: The smallest relative improvement that counts (default: 1e-3).
        tau: The threshold of `sensli.Grower` (default: 0.0).
        refit: Whether to train again on all samples, through the epochs and insertions that were best (default: True).
        warm_start: Whether the next `fit` continues with the network of the last one (default: False).
        random_state: The random seed, or a numpy RandomState.
        verbose: Whether to print what happens (default: 0).
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GrowingRegressor:
        """Fit the network.

        Args:
            X: The samples, of shape (n, features).
            y: The targets, of shape (n,) or (n, targets).
            sample_weight: The weight of each sample. None weights all equally.

        Returns:
            The estimator itself.
        """
        self._validate_params()
        first = not (self.warm_start and hasattr(self, "model_"))
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first, multi_output=True, y_numeric=True)
        targets = y.reshape(len(y), -1).astype(np.float64)
        if first:
            weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            self._y_mean, self._y_scale = _moments(targets, weight)
        elif targets.shape[1] != len(self._y_mean):
            raise ValueError(
                f"warm_start=True continues with {len(self._y_mean)} targets, but y has {targets.shape[1]}."
            )
        self._flat = y.ndim == 1
        self._fit(X, (targets - self._y_mean) / self._y_scale, sample_weight, targets.shape[1])
        return self

    def predict(self, X: Any) -> Any:
        """The predicted targets.

        Args:
            X: The samples, of shape (n, features).
        """
        output = self._output(X)
        found = output.numpy() * self._y_scale + self._y_mean
        return found[:, 0] if self._flat else found

    @staticmethod
    def _loss(output: Tensor, rest: Any) -> Tensor:
        target, weight = rest
        loss: Tensor = ((output - target).square().mean(1) * weight).mean()
        return loss

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _Standardize(nn.Module):
    """``(x - mean) / scale`` with the moments of the training data."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Any, scale: Any) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(mean))
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def _network(x: Any, weight: Any, width: int, outputs: int) -> nn.Sequential:
    layers = [_Standardize(*_moments(x, weight)), nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers).double()  # as scikit-learn computes; the networks are small


def _moments(values: Any, weight: Any) -> tuple[Any, Any]:
    """Weighted mean and deviation of each column; a column that does not vary keeps its scale."""
    mean = np.average(values, axis=0, weights=weight)
    scale = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
    return mean, np.where(scale > 1e-12 * np.maximum(1.0, np.abs(mean)), scale, 1.0)


def _data(x: Any, y: Any, weight: Any) -> Data:
    # Weights of mean one: the mean over a batch then is the weighted mean loss, also of batches drawn from the whole.
    return torch.from_numpy(x), (torch.from_numpy(np.asarray(y)), torch.from_numpy(weight / weight.mean()))


def _silent(line: str) -> None:
    pass
