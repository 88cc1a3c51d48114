"""`GrowingClassifier` and `GrowingRegressor`: scikit-learn estimators with no architecture to choose.

`fit` starts with two hidden layers, adds layers and units while the held-out samples improve, and stops by itself. Several networks
grow together, and each holds out another part, so every sample takes part in the decision. At the end all train on all samples for a
while (``refit=False`` leaves that out), and the prediction is their mean.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, softmax

from sensli.integrations import missing
from sensli.integrations.committee import sharpened
from sensli.integrations.estimator import GrowingEstimator, moments

try:
    import numpy as np
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils import compute_sample_weight
    from sklearn.utils._param_validation import Interval, StrOptions
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import validate_data
except ImportError as error:
    raise missing("sklearn", error) from error


class GrowingClassifier(ClassifierMixin, GrowingEstimator):  # type: ignore[misc]
    """A classifier that grows its networks during `fit`.

    Args:
        members: The number of networks, whose mean is the prediction; each holds out another part of the samples (default: 5).
        layers: The number of hidden layers that `fit` starts with (default: 2).
        width: The number of units of each of them, and of those that a layer gets at a time (default: 100).
        max_layers: The largest number of hidden layers (default: 4).
        max_width: The largest number of units of a hidden layer (default: 200).
        learning_rate: The learning rate of AdamW (default: 3e-3).
        weight_decay: The decoupled weight decay (default: 1e-4).
        batch_size: The number of samples in a batch (default: 200).
        max_epochs: The largest number of epochs (default: 500).
        patience: The number of evaluations of the held-out samples without an improvement before growing or stopping (default: 10).
        tolerance: The smallest relative improvement that counts (default: 1e-2).
        tau: The threshold of `sensli.Grower` (default: 0.0).
        refit: Whether to train on all samples at the end, none held out: for half of the epochs that helped, or for as many where the
            loss still fell when growing ended (default: True).
        label_smoothing: The share of a label that is spread over all classes in training, at least 0 and below 1; the probabilities are
            freed from it (default: 0.1).
        class_weight: Weights of the classes by label, or ``"balanced"`` for the inverse of their frequencies. None weights all
            equally.
        warm_start: Whether the next `fit` continues with the networks of the last one (default: False).
        device: Where `fit` and `partial_fit` train, as torch calls it, such as "cuda"; ``model_`` is on the CPU afterwards, so that
            every machine can read a pickle and predict (default: "cpu").
        random_state: The random seed, or a numpy RandomState.
        verbose: Whether to print what happens (default: 0).
    """

    classes_: Any
    _classify: ClassVar[bool] = True
    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **GrowingEstimator._parameter_constraints,
        "label_smoothing": [Interval(Real, 0, 1, closed="left")],
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }

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
        label_smoothing: float = 0.1,
        class_weight: Any = None,
        warm_start: bool = False,
        device: Any = "cpu",
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            members=members, layers=layers, width=width, max_layers=max_layers, max_width=max_width, learning_rate=learning_rate,
            weight_decay=weight_decay, batch_size=batch_size, max_epochs=max_epochs, patience=patience, tolerance=tolerance, tau=tau,
            refit=refit, warm_start=warm_start, device=device, random_state=random_state, verbose=verbose,
        )  # fmt: skip
        self.label_smoothing = label_smoothing
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GrowingClassifier:
        """Fit the networks.

        Args:
            X: The samples, of shape (n, features).
            y: The labels, of shape (n,).
            sample_weight: The weight of each sample. None weights all equally.

        Returns:
            The estimator itself.
        """
        self._validate_params()
        X, y = validate_data(self, X, y, dtype=np.float64, reset=not self._continues)
        check_classification_targets(y)
        classes = np.unique(y)
        if self._continues and not np.array_equal(classes, self.classes_):
            raise ValueError(
                f"{type(self).__name__}(warm_start=True) continues with the classes {self.classes_}, but y contains {classes}."
            )
        weight = self._class_weights(sample_weight, X, y)
        self.classes_ = classes
        self._fit(X, np.searchsorted(classes, y), weight, max(2, len(classes)))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> GrowingClassifier:
        """Train for one pass over some samples, without growth: after `fit` with the networks that it grew.

        Args:
            X: The samples, of shape (n, features).
            y: The labels, of shape (n,).
            classes: All labels that will ever come. Needed at the first call, unless `fit` was called before.
            sample_weight: The weight of each sample. None weights all equally.

        Returns:
            The estimator itself.
        """
        self._validate_params()
        known = getattr(self, "classes_", None) if classes is None else np.unique(classes)
        if known is None:
            raise ValueError(f"classes must be given at the first call of {type(self).__name__}.partial_fit, got None.")
        if hasattr(self, "model_") and not np.array_equal(known, self.classes_):
            raise ValueError(
                f"classes must be those of the first call of {type(self).__name__}.partial_fit, {self.classes_}, got {known}."
            )
        X, y = validate_data(self, X, y, dtype=np.float64, reset=not hasattr(self, "model_"))
        check_classification_targets(y)
        if not np.isin(y, known).all():
            raise ValueError(f"y must contain only the classes {known} of {type(self).__name__}, got {np.unique(y)}.")
        weight = self._class_weights(sample_weight, X, y)
        self.classes_ = known
        self._partial_fit(X, np.searchsorted(known, y), weight, max(2, len(known)))
        return self

    def _class_weights(self, sample_weight: Any, X: Any, y: Any) -> Any:
        weight = self._weights(sample_weight, X)
        return weight if self.class_weight is None else weight * compute_sample_weight(self.class_weight, y)

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

    @property
    def _smoothing(self) -> float:
        return self.label_smoothing

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="none", label_smoothing=self.label_smoothing)

    def _scores(self, output: Tensor, target: Tensor) -> Tensor:
        # The squared error of the probabilities: one sample that is wrong and sure of it does not outweigh all others.
        found = sharpened(output.softmax(-1), self.label_smoothing)
        return (found - one_hot(target, output.shape[-1])).square().sum(-1)


class GrowingRegressor(RegressorMixin, GrowingEstimator):  # type: ignore[misc]
    """A regressor that grows its networks during `fit`; targets are standardised inside, so their unit does not matter.

    Args:
        members: The number of networks, whose mean is the prediction; each holds out another part of the samples (default: 5).
        layers: The number of hidden layers that `fit` starts with (default: 2).
        width: The number of units of each of them, and of those that a layer gets at a time (default: 100).
        max_layers: The largest number of hidden layers (default: 4).
        max_width: The largest number of units of a hidden layer (default: 200).
        learning_rate: The learning rate of AdamW (default: 3e-3).
        weight_decay: The decoupled weight decay (default: 1e-4).
        batch_size: The number of samples in a batch (default: 200).
        max_epochs: The largest number of epochs (default: 500).
        patience: The number of evaluations of the held-out samples without an improvement before growing or stopping (default: 10).
        tolerance: The smallest relative improvement that counts (default: 1e-2).
        tau: The threshold of `sensli.Grower` (default: 0.0).
        refit: Whether to train on all samples at the end, none held out: for half of the epochs that helped, or for as many where the
            loss still fell when growing ended (default: True).
        warm_start: Whether the next `fit` continues with the networks of the last one (default: False).
        device: Where `fit` and `partial_fit` train, as torch calls it, such as "cuda"; ``model_`` is on the CPU afterwards, so that
            every machine can read a pickle and predict (default: "cpu").
        random_state: The random seed, or a numpy RandomState.
        verbose: Whether to print what happens (default: 0).
    """

    _classify: ClassVar[bool] = False
    _y_mean: Any
    _y_scale: Any

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GrowingRegressor:
        """Fit the networks.

        Args:
            X: The samples, of shape (n, features).
            y: The targets, of shape (n,) or (n, targets).
            sample_weight: The weight of each sample. None weights all equally.

        Returns:
            The estimator itself.
        """
        self._validate_params()
        X, targets, weight = self._checked(X, y, sample_weight, first=not self._continues)
        self._fit(X, (targets - self._y_mean) / self._y_scale, weight, targets.shape[1])
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> GrowingRegressor:
        """Train for one pass over some samples, without growth: after `fit` with the networks that it grew.

        Args:
            X: The samples, of shape (n, features).
            y: The targets, of shape (n,) or (n, targets).
            sample_weight: The weight of each sample. None weights all equally.

        Returns:
            The estimator itself.
        """
        self._validate_params()
        X, targets, weight = self._checked(X, y, sample_weight, first=not hasattr(self, "model_"))
        self._partial_fit(X, (targets - self._y_mean) / self._y_scale, weight, targets.shape[1])
        return self

    def _checked(self, X: Any, y: Any, sample_weight: Any, *, first: bool) -> tuple[Any, Any, Any]:
        """Samples, targets as columns, weights; the first time the moments of the targets are kept."""
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first, multi_output=True, y_numeric=True)
        targets = y.reshape(len(y), -1).astype(np.float64)
        if not first and targets.shape[1] != len(self._y_mean):
            raise ValueError(
                f"{type(self).__name__} continues with {len(self._y_mean)} targets, but y has {targets.shape[1]}."
            )
        weight = self._weights(sample_weight, X)
        if first:
            self._y_mean, self._y_scale = moments(targets, weight)
        self._flat = y.ndim == 1
        return X, targets, weight

    def predict(self, X: Any) -> Any:
        """The predicted targets.

        Args:
            X: The samples, of shape (n, features).
        """
        output = self._output(X)
        found = output.numpy() * self._y_scale + self._y_mean
        return found[:, 0] if self._flat else found

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean(-1)

    _scores = _losses

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
