"""`GrowingClassifier` and `GrowingRegressor`: scikit-learn estimators with no architecture to choose.

`fit` starts with one layer of eight units, doubles layers or adds one while the held-out samples improve, and stops by itself.
Several networks grow together, and each holds out another part, so every sample takes part in the decision. At the end one of them
trains on all samples for a while (``refit=False`` leaves that out), or all of them if the held-out samples say that their mean is
better.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, softmax

from sensli.integrations import missing_library
from sensli.integrations.fitting import Diverged, Fit, FitPlan, FoldData, SparseRows, Stacked, train_on
from sensli.modules import random_state
from sensli.modules.running import brief_error, fit_threads
from sensli.surgery.history import History
from sensli.text.progress import progress

# ---- Networks that answer together: the module that a scikit-learn estimator of sensli keeps as ``model_``.


class Committee(nn.Module):
    """Makes features of its input, asks every member, and takes the mean: of the outputs, or of the probabilities of classes.

    The input has a column for each of the table's; `columns.TableReader` says how words and dates are numbers there. For classes the output
    is the logarithm of the mean probabilities, divided by the temperature that makes them as sure as they should be: ``softmax`` of it
    gives probabilities again.
    """

    def __init__(self, members: Iterable[nn.Module], features: Features, *, classify: bool) -> None:
        super().__init__()
        self.features, self.members = features, nn.ModuleList(members)
        self.classify, self.temperature = classify, 1.0

    def forward(self, x: Tensor | SparseRows) -> Tensor:
        if isinstance(x, SparseRows):  # the features of a sparse matrix
            outputs = torch.cat([Stacked([member], 0.0, 0.0).forward(x) for member in self.members])
        else:
            x = self.features(x)
            outputs = torch.stack([member(x) for member in self.members])
        return mean_output(outputs, classify=self.classify) / self.temperature


def mean_output(outputs: Tensor, *, classify: bool) -> Tensor:
    """The mean over networks, the first dimension: of outputs, or of probabilities, as logarithms."""
    return outputs.softmax(-1).mean(0).log() if classify else outputs.mean(0)


def best_temperature(output: Tensor, target: Tensor, share: Tensor) -> float:
    """What the logarithms of probabilities are divided by for the smallest log loss of these samples."""
    logs = output.double().log_softmax(-1)
    tried = torch.logspace(-0.5, 0.7, 37, dtype=torch.float64, device=logs.device)
    losses = [share.double() @ cross_entropy(logs / each, target, reduction="none") for each in tried]
    return float(tried[torch.stack(losses).argmin()])


def networks(count: int, sizes: Sequence[int]) -> list[nn.Module]:
    """So many networks with layers of these sizes, from the inputs to the outputs, which differ in their first weights."""
    return [_network(sizes) for _ in range(count)]


def _network(sizes: Sequence[int]) -> nn.Sequential:
    layers = [nn.Linear(*pair, device="cpu") for pair in pairwise(sizes)]
    return nn.Sequential(*(module for layer in layers[:-1] for module in (layer, nn.ReLU())), layers[-1])


# ---- What `GrowingClassifier` and `GrowingRegressor` share: their settings, the folds, the fit and what it leaves.


try:
    import numpy as np
    from scipy.sparse import issparse
    from sklearn.base import BaseEstimator
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import KFold, StratifiedKFold
    from sklearn.utils import check_random_state
    from sklearn.utils._param_validation import Interval, StrOptions
    from sklearn.utils.validation import (
        _check_sample_weight,
        _check_y,
        check_array,
        check_consistent_length,
        check_is_fitted,
        validate_data,
    )

    from sensli.integrations.columns import Features, TableReader, column_moments, is_frame
except ImportError as error:
    raise missing_library("sklearn", error) from error


def all_or_nothing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that leaves the estimator as it was if it raises."""

    @wraps(method)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        before = dict(vars(self))
        try:
            return method(self, *args, **options)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    return called


PARTS = 3  # of the samples, each of which some networks hold out
FEWEST = 50  # fewer samples decide nothing: then nothing is held out and nothing grows


def _whole() -> Any:
    return Interval(Integral, 1, None, closed="left")


class GrowingEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share. Inputs are standardised inside, with the mean and deviation of the training data."""

    def __init__(
        self, *, members: Any = "auto", layers: int = 1, width: int = 8, max_layers: int = 3, max_width: int = 128,
        learning_rate: float = 3e-3, weight_decay: float = 1e-4, batch_size: int = 200, max_epochs: int = 500, patience: int = 3,
        tolerance: float = 1e-2, tau: float = 0.0, refit: bool = True, categorical_features: Any = "from_dtype", bins: int = 16,
        warm_start: bool = False, device: Any = "cpu", random_state: Any = None, verbose: int = 0,
    ) -> None:  # fmt: skip
        self.members, self.layers, self.width = members, layers, width
        self.max_layers, self.max_width, self.max_epochs = max_layers, max_width, max_epochs
        self.learning_rate, self.weight_decay, self.batch_size = learning_rate, weight_decay, batch_size
        self.patience, self.tolerance, self.tau, self.refit = patience, tolerance, tau, refit
        self.categorical_features, self.bins, self.warm_start = categorical_features, bins, warm_start
        self.device, self.random_state, self.verbose = device, random_state, verbose

    model_: Committee
    history_: History
    loss_curve_: list[float]
    _classify: ClassVar[bool]

    # What scikit-learn's `_validate_params` checks when fitting begins, before anything changes.
    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "members": [_whole(), StrOptions({"auto"})],
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
        "categorical_features": [StrOptions({"from_dtype"}), "array-like", None],
        "bins": [_whole()],
        "warm_start": ["boolean"],
        "device": [str, torch.device],
        "random_state": ["random_state"],
        "verbose": ["verbose"],
    }

    @property
    def _continues(self) -> bool:
        return bool(self.warm_start and hasattr(self, "model_"))

    def _start_count(self, samples: int) -> int:
        """How many networks begin: if the samples decide, two for each part that is held out, or one where nothing is."""
        if self.members == "auto":
            return 2 * PARTS if samples >= FEWEST else 1
        return int(self.members)

    def _fit(self, x: Any, y: Any, weight: Any, outputs: int) -> None:
        """Train on targets that are numbers already: the indices of classes, or one column for each target."""
        counts = weight > 0
        x, y, weight = x[counts], y[counts], weight[counts]
        random, name = check_random_state(self.random_state), type(self).__name__
        goes_on, device = self._continues, self._device()
        bar = progress(name, self.max_epochs) if self.verbose else nullcontext(_no_bar)
        # The user's own draws continue as if nothing had been fitted.
        with random_state.kept_of_torch(), bar as reach:
            random_state.seed_torch(int(random.randint(2**31 - 1)))
            model = copy.deepcopy(self.model_) if goes_on else self._start(x, weight, outputs)
            # Two networks hold out the same if they are to tell whether more than one pay.
            copies = 2 if self.members == "auto" and len(model.members) % 2 == 0 else 1
            rows, held_out = self._folds(y, random, len(model.members) // copies)
            rows, held_out = rows * copies, held_out * copies
            # The few samples of which none is held out cost nothing in double precision, on the CPU.
            device, precision = (device, torch.float32) if held_out else (torch.device("cpu"), torch.float64)
            data = _data(model, x, y, weight, rows, held_out, precision, device, copies)
            history = History(self.history_, record=self.history_.record.copied()) if goes_on else History()
            history.record.metric = "validation loss" if held_out else "training loss"
            fit = Fit(
                list(model.members.to(device, precision)), data, self._losses,
                self._scores if held_out else self._losses, self._plan(), print if self.verbose else _silent, history, reach,
            )  # fmt: skip
            try:
                with fit_threads(self._operations(model)):
                    fitted = fit.run()
            except Diverged as error:
                raise ValueError(f"{name}: {error}") from error
            mean = partial(mean_output, classify=self._classify)
            alone = copies > 1 and not self.warm_start and not (held_out and fit.pays(mean))
            if held_out and self._classify:
                model.temperature = best_temperature(*fit.held_out(None if alone else mean))
            if alone:
                model.members, fit.networks = model.members[:1], fit.networks[:1]
            # What a warm start continues with must not have seen what its networks hold out.
            if self.refit and not self.warm_start and held_out:
                with fit_threads(self._operations(model)):
                    fit.finish()
        if fitted.stopped:
            warnings.warn(
                f"{name} stopped after max_epochs={self.max_epochs} epochs, while the loss still improved. Increase max_epochs.",
                ConvergenceWarning,
                stacklevel=4,
            )
        self._keep(model, [*self.loss_curve_, *fitted.curve] if goes_on else fitted.curve)
        self.history_, self.validation_loss_ = fitted.history, fitted.loss

    def _operations(self, model: Committee) -> float:
        """About how many a step takes: forward, and twice that backward."""
        return 6.0 * self.batch_size * sum(parameter.numel() for parameter in model.members.parameters())

    def _partial_fit(self, x: Any, y: Any, weight: Any, outputs: int) -> None:
        """One pass over the samples, without growth; the optimizer continues from call to call."""
        device = self._device()
        with random_state.kept_of_torch():
            random = check_random_state(self.random_state)
            random_state.seed_torch(int(random.randint(2**31 - 1)) + len(getattr(self, "loss_curve_", ())))
            first = not hasattr(self, "model_")
            model = self._start(x, weight, outputs, in_parts=self.members == "auto") if first else self.model_
            if not hasattr(self, "_stacked"):
                model.members.float()
                self._stacked = Stacked(list(model.members), self.learning_rate, self.weight_decay)
                model.members.double()
            self._stacked = self._stacked.on(device)  # a copy, which a failure leaves behind
            everything = torch.arange(x.shape[0], device="cpu")
            data = _data(model, x, y, weight, [everything] * len(model.members), [], torch.float32, device)
            try:
                with fit_threads(self._operations(model)):
                    loss = train_on(self._stacked, data, self._losses, self.batch_size)
            except Diverged as error:
                raise ValueError(f"{type(self).__name__}: {error}") from error
            self._stacked.write(self._stacked.average)
        if first:
            self.history_ = History()
        self._keep(model, [*getattr(self, "loss_curve_", ()), loss], self._stacked)

    def _start(self, x: Any, weight: Any, outputs: int, *, in_parts: bool = False) -> Committee:
        features = Features(x, weight, self._reader.parts, self.bins)
        members = networks(
            1 if in_parts else self._start_count(x.shape[0]), [features.count, *[self.width] * self.layers, outputs]
        )
        return Committee(members, features, classify=self._classify)

    def _keep(self, model: Committee, curve: list[float], stacked: Stacked | None = None) -> None:
        self.model_, self.loss_curve_, self.n_iter_ = model, curve, len(curve)
        # On the CPU, where a pickle of it can be read on any machine, and in double precision, as scikit-learn computes: one sample
        # gives the same alone as among others.
        model.members.cpu().double()
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

    def _plan(self) -> FitPlan:
        return FitPlan(
            self.learning_rate, self.weight_decay, self.batch_size, self.max_epochs, self.patience, self.tolerance,
            self.max_layers, self.max_width, self.tau,
        )  # fmt: skip

    def _folds(self, y: Any, random: Any, members: int) -> tuple[list[Tensor], list[Tensor]]:
        """The rows that each network trains on and holds out; below a size all train on all."""
        if len(y) < max(FEWEST, members):
            return [torch.arange(len(y), device="cpu")] * members, []
        alike = self._classify and np.unique(y, return_counts=True)[1].min() >= max(members, 5 if members == 1 else 2)
        folds = (StratifiedKFold if alike else KFold)(members if members > 1 else 5, shuffle=True, random_state=random)
        pairs = [(torch.from_numpy(train), torch.from_numpy(rest)) for train, rest in folds.split(y, y)][:members]
        return [train for train, _ in pairs], [rest for _, rest in pairs]

    def _weights(self, sample_weight: Any, x: Any) -> Any:
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        if not (weight > 0).any():
            raise ValueError(f"sample_weight must have a weight above zero for {type(self).__name__}, got only zeros.")
        return weight

    def _output(self, x: Any) -> Tensor:
        check_is_fitted(self)
        x = self._matrix(validate_data(self, self._cells(x), reset=False, skip_check_array=True))
        with torch.no_grad():
            if issparse(x):
                rows = self.model_.features.inputs(x, torch.float64, torch.device("cpu"))
                x = rows[torch.arange(len(rows), device="cpu")[None]]
            else:
                x = torch.tensor(x, device="cpu")  # a copy: what pandas hands out may be read-only
            out: Tensor = self.model_(x)
            return out

    def _read(self, x: Any, y: Any, *, first: bool, numeric: bool) -> tuple[Any, Any]:
        """The table as a matrix, and the targets; the first time with a reader for this table and those to come."""
        x, y = validate_data(self, self._cells(x), y, reset=first, skip_check_array=True)
        y = _check_y(y, multi_output=numeric, y_numeric=numeric, estimator=self)
        x = self._matrix(x, first=first)
        check_consistent_length(x, y)
        return x, y

    def _cells(self, x: Any) -> Any:
        """A frame as it is; what else holds samples as an array of numbers or of cells."""
        if hasattr(x, "collect"):
            raise TypeError(
                f"X must be a table in memory for {type(self).__name__}, got a {type(x).__name__}. Call collect() first."
            )
        if is_frame(x):
            return x
        if not hasattr(x, "dtype") and np.asarray(x).dtype.kind in "OUS":
            x = np.asarray(x, dtype=object)  # numbers among words stay numbers
        kind: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        if getattr(getattr(x, "dtype", None), "kind", "f") in "OUSMm":
            kind = {"dtype": None, "ensure_all_finite": False}
        return check_array(x, accept_sparse="csr", estimator=self, input_name="X", **kind)

    def _matrix(self, cells: Any, *, first: bool = False) -> Any:
        """Samples as a matrix of numbers, with NaN for gaps."""
        if first:
            self._reader = TableReader(cells, self.categorical_features, type(self).__name__)
        found = self._reader.read(cells)
        return check_array(found, accept_sparse="csr", ensure_all_finite="allow-nan", estimator=self, input_name="X")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        for kind in ("allow_nan", "categorical", "sparse", "string"):
            setattr(tags.input_tags, kind, True)
        return tags

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """What each sample loses in training."""
        raise NotImplementedError

    def _scores(self, output: Tensor, target: Tensor) -> Tensor:
        """What each held-out sample is judged by."""
        raise NotImplementedError


def _data(
    model: Committee, x: Any, y: Any, weight: Any, rows: list[Tensor], held_out: list[Tensor], precision: torch.dtype,
    device: torch.device, copies: int = 1,
) -> FoldData:  # fmt: skip
    """The features as the model makes them, on the device to train on."""
    target = torch.tensor(y, dtype=precision if np.issubdtype(y.dtype, np.floating) else None, device="cpu")
    weights = torch.tensor(weight, dtype=precision, device="cpu")
    return FoldData(
        model.features.inputs(x, precision, device), target.to(device), weights.to(device), rows, held_out, copies
    )


def _silent(line: str) -> None:
    pass


def _no_bar(done: float, note: str = "") -> None:
    pass


try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
except ImportError as error:
    raise missing_library("sklearn", error) from error


class GrowingClassifier(ClassifierMixin, GrowingEstimator):  # type: ignore[misc]
    """A classifier that grows its networks during `fit`.

    Args:
        members: The number of networks, whose mean is the prediction; each holds out another part of the samples, one
            alone a fifth. ``"auto"`` keeps one network, or six if the held-out samples say that their mean is better (default: "auto").
        layers: The number of hidden layers that `fit` starts with (default: 1).
        width: The number of units of each of them; a growth doubles those of a layer (default: 8).
        max_layers: The largest number of hidden layers (default: 3).
        max_width: The largest number of units of a hidden layer (default: 128).
        learning_rate: The learning rate of AdamW (default: 3e-3).
        weight_decay: The decoupled weight decay (default: 1e-4).
        batch_size: The number of samples in a batch (default: 200).
        max_epochs: The largest number of epochs (default: 500).
        patience: The number of evaluations of the held-out samples without an improvement before growing or stopping (default: 3).
        tolerance: The smallest relative improvement that counts (default: 1e-2).
        tau: The threshold of `sensli.Grower` (default: 0.0).
        refit: Whether to train on all samples at the end, none held out: for half of the epochs that helped, or for as many where the
            loss still fell when growing ended (default: True).
        label_smoothing: The share of a label that is spread over all classes in training, at least 0 and below 1 (default: 0.1).
        class_weight: Weights of the classes by label, or ``"balanced"`` for the inverse of their frequencies. None weights all
            equally.
        categorical_features: Which columns are categories: ``"from_dtype"`` takes those of text or of a categorical type; or their
            places, their names or a mask; None says that there are none (default: "from_dtype").
        bins: The most pieces of a numerical column, between quantiles, each of which is an input of its own; with 1 the column is
            one input (default: 16).
        warm_start: Whether the next `fit` continues with the networks of the last one (default: False).
        device: Where `fit` and `partial_fit` train, as torch calls it, such as "cuda"; ``model_`` is on the CPU afterwards, so that
            every machine can read a pickle and predict (default: "cpu").
        random_state: The random seed, or a numpy RandomState.
        verbose: Whether to print what happens, with a bar in a terminal (default: 0).
    """

    classes_: Any
    _classify: ClassVar[bool] = True
    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **GrowingEstimator._parameter_constraints,
        "label_smoothing": [Interval(Real, 0, 1, closed="left")],
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }

    def __init__(
        self, *, members: Any = "auto", layers: int = 1, width: int = 8, max_layers: int = 3, max_width: int = 128,
        learning_rate: float = 3e-3, weight_decay: float = 1e-4, batch_size: int = 200, max_epochs: int = 500, patience: int = 3,
        tolerance: float = 1e-2, tau: float = 0.0, refit: bool = True, label_smoothing: float = 0.1, class_weight: Any = None,
        categorical_features: Any = "from_dtype", bins: int = 16, warm_start: bool = False, device: Any = "cpu",
        random_state: Any = None, verbose: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            members=members, layers=layers, width=width, max_layers=max_layers, max_width=max_width, learning_rate=learning_rate,
            weight_decay=weight_decay, batch_size=batch_size, max_epochs=max_epochs, patience=patience, tolerance=tolerance, tau=tau,
            refit=refit, categorical_features=categorical_features, bins=bins, warm_start=warm_start, device=device,
            random_state=random_state, verbose=verbose,
        )  # fmt: skip
        self.label_smoothing, self.class_weight = label_smoothing, class_weight

    @all_or_nothing
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
        X, y = self._read(X, y, first=not self._continues, numeric=False)
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

    @all_or_nothing
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
        X, y = self._read(X, y, first=not hasattr(self, "model_"), numeric=False)
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

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="none", label_smoothing=self.label_smoothing)

    def _scores(self, output: Tensor, target: Tensor) -> Tensor:
        # The squared error of the probabilities: one sample that is wrong and sure of it does not outweigh all others.
        return (output.softmax(-1) - one_hot(target, output.shape[-1])).square().sum(-1)


class GrowingRegressor(RegressorMixin, GrowingEstimator):  # type: ignore[misc]
    """A regressor that grows its networks during `fit`; targets are standardised inside, so their unit does not matter.

    Args:
        members: The number of networks, whose mean is the prediction; each holds out another part of the samples, one
            alone a fifth. ``"auto"`` keeps one network, or six if the held-out samples say that their mean is better (default: "auto").
        layers: The number of hidden layers that `fit` starts with (default: 1).
        width: The number of units of each of them; a growth doubles those of a layer (default: 8).
        max_layers: The largest number of hidden layers (default: 3).
        max_width: The largest number of units of a hidden layer (default: 128).
        learning_rate: The learning rate of AdamW (default: 3e-3).
        weight_decay: The decoupled weight decay (default: 1e-4).
        batch_size: The number of samples in a batch (default: 200).
        max_epochs: The largest number of epochs (default: 500).
        patience: The number of evaluations of the held-out samples without an improvement before growing or stopping (default: 3).
        tolerance: The smallest relative improvement that counts (default: 1e-2).
        tau: The threshold of `sensli.Grower` (default: 0.0).
        refit: Whether to train on all samples at the end, none held out: for half of the epochs that helped, or for as many where the
            loss still fell when growing ended (default: True).
        categorical_features: Which columns are categories: ``"from_dtype"`` takes those of text or of a categorical type; or their
            places, their names or a mask; None says that there are none (default: "from_dtype").
        bins: The most pieces of a numerical column, between quantiles, each of which is an input of its own; with 1 the column is
            one input (default: 16).
        warm_start: Whether the next `fit` continues with the networks of the last one (default: False).
        device: Where `fit` and `partial_fit` train, as torch calls it, such as "cuda"; ``model_`` is on the CPU afterwards, so that
            every machine can read a pickle and predict (default: "cpu").
        random_state: The random seed, or a numpy RandomState.
        verbose: Whether to print what happens, with a bar in a terminal (default: 0).
    """

    _classify: ClassVar[bool] = False
    _y_mean: Any
    _y_scale: Any

    @all_or_nothing
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

    @all_or_nothing
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
        X, y = self._read(X, y, first=first, numeric=True)
        targets = y.reshape(len(y), -1).astype(np.float64)
        if not first and targets.shape[1] != len(self._y_mean):
            raise ValueError(
                f"{type(self).__name__} continues with {len(self._y_mean)} targets, but y has {targets.shape[1]}."
            )
        weight = self._weights(sample_weight, X)
        if first:
            self._y_mean, self._y_scale = column_moments(targets, weight)
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
