"""Every mistake is told with where, what, why and what to do, and after it everything is as it was."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from models import Functional, Named, batches, cnn, fnn, images, labels, loss_fn, points, untouched
from sensli import Probe, find_sites, insert, measure
from sensli.errors import (
    BadExample,
    MeasurementError,
    OptimizerError,
    SensliError,
    UnknownSite,
    UnsupportedModel,
    ZeroMerits,
)

DATA, EMPTY, NARROW = batches(), (points(0), labels(0)), (points()[:, :2], labels())
STRANGER = fnn()
STRANGE_SITES = find_sites(STRANGER, points())
NAN, INF = float("nan"), float("inf")


def prepared(make=fnn):
    """A model in the middle of training: gradients, moments, parts in another mode, frozen parts, hooks of its own."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = points() if make is not cnn else images()
    loss_fn(model(x), labels(len(x))).backward()
    optimizer.step()
    first = next(iter(model.children()))
    first.eval()
    first.register_forward_hook(lambda *_: None)
    next(iter(model.parameters())).requires_grad_(False)
    return model, optimizer


class Fails(nn.Module):
    """Raises in its forward when told to, in the middle of the model."""

    def __init__(self):
        super().__init__()
        self.net, self.norm, self.broken = fnn(), nn.BatchNorm1d(3).double(), False

    def forward(self, x):
        x = self.net[:3](self.norm(x) + torch.rand_like(x))
        if self.broken:
            raise RuntimeError("broken in the middle")
        return self.net[3:](x)


MEASUREMENTS = {
    "no sites": (lambda m, s: measure(m, [], DATA, loss_fn), MeasurementError, "no sites to measure.*explain"),
    "empty loader": (lambda m, s: measure(m, s, [], loss_fn), MeasurementError, "empty.*Give a new one"),
    "exhausted": (lambda m, s: measure(m, s, iter(()), loss_fn), MeasurementError, "used up"),
    "vector loss": (
        lambda m, s: measure(m, s, DATA, lambda o, t: F.cross_entropy(o, t, reduction="none")),
        MeasurementError,
        r"batch 0 has shape \(6,\), not a scalar.*reduction='mean'",
    ),
    "number loss": (lambda m, s: measure(m, s, DATA, lambda o, t: 3.0), MeasurementError, "type float"),
    "no loss": (lambda m, s: measure(m, s, DATA), MeasurementError, "loss_fn is missing"),
    "nan loss": (lambda m, s: measure(m, s, DATA, lambda o, t: o.sum() * NAN), MeasurementError, "nan.*diverged"),
    "inf loss": (lambda m, s: measure(m, s, DATA, lambda o, t: o.sum().exp() * INF), MeasurementError, "is inf"),
    "nan gradient": (
        lambda m, s: measure(m, s, DATA, lambda o, t: (o.double() * 0).sqrt().sum()),
        MeasurementError,
        "not finite although the loss is",
    ),
    "nan in the second batch": (
        lambda m, s: measure(m, s, [DATA[0], (DATA[1][0] * NAN, DATA[1][1])], loss_fn),
        MeasurementError,
        "batch 1 is nan",
    ),
    "detached": (
        lambda m, s: measure(m, s, DATA, lambda o, t: loss_fn(o.detach(), t)),
        MeasurementError,
        "does not depend on any site",
    ),
    "flat": (lambda m, s: measure(m, s, DATA, lambda o, t: (o * 0).sum()), ZeroMerits, "all 2 merits are zero"),
    "on the meta device": (
        lambda m, s: measure(m, s, [tuple(t.to("meta") for t in DATA[0])], loss_fn),
        MeasurementError,
        "batch 0 is on the meta device",
    ),
    "complex loss": (
        lambda m, s: measure(m, s, DATA, lambda o, t: torch.complex(o, o).mean()),
        MeasurementError,
        r"batch 0 is a complex number \(torch.complex128\)",
    ),
    "one tensor": (lambda m, s: measure(m, s, [DATA[0][0]], loss_fn), MeasurementError, r"give \[\(x, y\)\]"),
    "three parts": (lambda m, s: measure(m, s, [(1, 2, 3)], loss_fn), MeasurementError, "pairs or dicts"),
    "no samples": (
        lambda m, s: measure(m, s, [EMPTY], lambda o, t: o.sum()),
        MeasurementError,
        "contains no samples",
    ),
    "unknown norm": (
        lambda m, s: measure(m, s, DATA, loss_fn, norm="nuclear"),
        ValueError,
        "'auto', 'frobenius', 'mean_square', 'operator', 'operator_l2', 'operator_l1'",
    ),
    "no batches wanted": (lambda m, s: measure(m, s, DATA, loss_fn, max_batches=0), ValueError, "at least 1"),
    "no level": (lambda m, s: measure(m, s, DATA, loss_fn, confidence=1.0), ValueError, "between 0 and 1"),
    "wrong shape": (lambda m, s: measure(m, s, [NARROW], loss_fn), RuntimeError, "shapes"),
    "loader raises": (lambda m, s: measure(m, s, (1 / 0 for _ in range(2)), loss_fn), ZeroDivisionError, "zero"),
    "loss raises": (lambda m, s: measure(m, s, DATA, lambda o, t: o[99]), IndexError, "out of bounds"),
    "site of another model": (
        lambda m, s: measure(m, STRANGE_SITES, DATA, loss_fn),
        UnknownSite,
        r"not a site of this \w+.*another model",
    ),
    "probe without sites": (lambda m, s: Probe(m, []), MeasurementError, "no sites to probe"),
    "probe without a pass": (lambda m, s: Probe(m, s).merits(), MeasurementError, "saw no backward pass.*inside"),
    "probe, unknown norm": (lambda m, s: Probe(m, s, norm="x"), ValueError, "one of 'auto'"),
    "probe of another model": (lambda m, s: Probe(STRANGER, s), UnknownSite, "not a site"),
}


@pytest.mark.parametrize("mistake", MEASUREMENTS)
@pytest.mark.parametrize("make", [fnn, Named, Functional])
def test_a_refused_measurement_leaves_no_trace(make, mistake):
    call, error, text = MEASUREMENTS[mistake]
    model, optimizer = prepared(make)
    sites = find_sites(model, points())
    with untouched(model, optimizer), pytest.raises(error, match=text):
        call(model, sites)


@pytest.mark.parametrize("call", ["measure", "sampled", "probe", "find_sites", "check"])
def test_an_exception_in_the_users_forward_leaves_no_hook_and_no_other_trace(call):
    model, _ = prepared(lambda: Fails())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sites = find_sites(model, points())
    assert len(sites) == 2
    model.broken = True
    x, y = DATA[0]

    def probe():
        with Probe(model, sites):
            raise RuntimeError("broken in the middle")

    calls = {
        "measure": lambda: measure(model, sites, DATA, loss_fn),
        "sampled": lambda: measure(model, sites, DATA, loss_fn, confidence=0.9, ratio=False),
        "probe": probe,
        "find_sites": lambda: find_sites(model, x),
        "check": lambda: insert(model, sites[0], optimizer=optimizer, lr_factor=0.5, check=(x, y)),
    }
    expected = BadExample if call in ("find_sites", "check") else RuntimeError
    with untouched(model, optimizer), pytest.raises(expected, match="broken in the middle"):
        calls[call]()


@pytest.mark.parametrize(
    "example, text",
    [
        (
            points()[:, :2],
            r"float64 tensor of shape \(6, 2\).*does not run through Sequential.*batch of the training data",
        ),
        (points().float(), "float32 tensor"),
        ((points(), points()), r"\(float64 tensor of shape \(6, 3\), float64"),
        ({"y": points()}, r"\{y: float64 tensor"),
        ([], r"with a tensor in it, got \[\]"),
        ({}, r"with a tensor in it, got \{\}"),
        ("text", "does not run"),
        (None, "example must be a tensor.*got None"),
    ],
)
def test_an_example_that_does_not_fit(example, text):
    model, optimizer = prepared()
    with untouched(model, optimizer), pytest.raises(BadExample, match=text):
        find_sites(model, example)


@pytest.mark.parametrize(
    "options, known",
    [
        ({"form": "magic"}, "'auto', 'relu', 'residual', 'parametric', 'twin'"),
        ({"where": "dense"}, "'conv', 'linear', 'block'"),
        ({"where": 3}, "'conv', 'linear', 'block'"),
        ({"kernel_size": 2}, "odd"),
        ({"kernel_size": 0}, "odd"),
    ],
)
def test_unknown_settings_list_the_known_ones(options, known):
    model, optimizer = prepared()
    x = points()
    with untouched(model, optimizer), pytest.raises(ValueError, match=known):
        find_sites(model, x, **options)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"optimizer": "adam"}, OptimizerError, "must be a torch.optim.Optimizer or a list of them, got 'adam'"),
        ({"group": 7}, OptimizerError, r"has 1 parameter group \(0\)"),
        ({"lr_factor": 0.0}, OptimizerError, "positive"),
        ({"lr_factor": NAN}, OptimizerError, "positive"),
        ({"scheduler": "step"}, OptimizerError, "must be a scheduler of torch.*got 'step'"),
    ],
)
def test_a_refused_insertion_changes_nothing(options, error, text):
    for make in (fnn, Named, Functional):
        model, optimizer = prepared(make)
        site = find_sites(model, points())[0]
        with untouched(model, optimizer), pytest.raises(error, match=text):
            insert(model, site, **{"optimizer": optimizer, **options})


@pytest.mark.parametrize("kind", ["stranger", "lbfgs", "rates without scheduler"])
def test_optimizers_that_cannot_follow(kind):
    model, _ = prepared()
    site = find_sites(model, points())[0]
    make, text, options = {
        "stranger": (
            lambda: torch.optim.SGD(fnn().parameters(), lr=0.1),
            "SGD contains no parameter of this Sequential, so it belongs to another model",
            {},
        ),
        "lbfgs": (lambda: torch.optim.LBFGS(model.parameters()), "LBFGS cannot follow.*flat vector", {}),
        "rates without scheduler": (lambda: scheduled(model), "without its scheduler", {"lr_factor": 0.5}),
    }[kind]
    given = make()
    with untouched(model, given), pytest.raises(OptimizerError, match=text):
        insert(model, site, optimizer=given, **options)


def scheduled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return optimizer


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refuses(model, text):
    site = find_sites(fnn(), points())[0]
    for call in (
        lambda: find_sites(model, points()),
        lambda: measure(model, [site], DATA, loss_fn),
        lambda: Probe(model, [site]),
        lambda: insert(model, site),
    ):
        with pytest.raises(UnsupportedModel, match=text):
            call()


def test_wrapped_models_are_refused_with_the_way_out(process_group):
    inside = nn.Sequential(nn.parallel.DistributedDataParallel(fnn()))
    refuses(inside, "'0' is wrapped in DistributedDataParallel.*Wrap the whole model")
    refuses(nn.DataParallel(fnn()), "the model is wrapped in DataParallel.*Use DistributedDataParallel")
    refuses(nn.Sequential(nn.DataParallel(fnn())), "'0' is wrapped in DataParallel")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_refused_and_scripted_parts_skipped():
    refuses(torch.jit.script(fnn()), "scripted")
    mixed = nn.Sequential(torch.jit.script(fnn()), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    sites = find_sites(mixed, points())
    assert [site.path for site in sites] == ["2"] and "scripted" in dict(sites.skipped)["0"]


@pytest.mark.parametrize(
    "model, text",
    [
        (lambda: "net.pt", "model must be an nn.Module, got 'net.pt'"),
        (lambda: lambda x: x, "model must be an nn.Module, got the function"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), "lazy layers.*Run one batch"),
    ],
)
def test_what_is_no_model_yet(model, text):
    refuses(model(), text)


def test_a_model_that_cannot_be_copied():
    model = fnn()
    model.cache = model[0](points())  # a tensor that carries a graph is copied without it
    assert find_sites(model, DATA[0][0])
    model.lock = threading.Lock()
    with untouched(model), pytest.raises(UnsupportedModel, match=r"cannot be copied.*open files"):
        find_sites(model, DATA[0][0])


def test_a_place_that_changes_under_the_measurement_is_noticed():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b, self.mood = nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2), "calm"
            self.double()

        def forward(self, x):
            h = self.act(self.a(x))
            if self.mood == "in place":
                h.mul_(2)
            return self.b(h)

    class Pair(nn.Module):
        def forward(self, x):
            return F.gelu(x), None

    model = Moody()
    (site,) = find_sites(model, points())
    model.mood = "in place"
    with untouched(model), pytest.raises(MeasurementError, match="overwritten in place"):
        measure(model, [site], DATA, loss_fn)
    model.mood = "calm"
    model.act.forward = Pair().forward
    with untouched(model), pytest.raises(MeasurementError, match="returned tuple instead of the tensor"):
        measure(model, [site], DATA, loss_fn)


def test_an_input_by_keyword_at_a_place_before_a_module_is_noticed():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.keyword = nn.Linear(3, 4), nn.Linear(4, 2), False
            self.double()

        def forward(self, x):
            h = F.relu(self.a(x))
            return self.b(input=h) if self.keyword else self.b(h)

    model = Either()
    (site,) = find_sites(model, points())
    model.keyword = True
    with untouched(model), pytest.raises(MeasurementError, match="first argument"):
        measure(model, [site], DATA, loss_fn)


def test_buffers_come_back_by_value_and_by_identity():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.norm = fnn(), nn.BatchNorm1d(3).double()
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("cache", None)
            self.register_buffer("seen", torch.zeros(0, 3).double())

        def forward(self, x):
            self.steps = self.steps + 1
            self.cache = x.detach().sum()
            self.seen = torch.cat([self.seen, x.detach()])
            return self.net(self.norm(x))

    model = Counting()
    sites = find_sites(model, points())
    with untouched(model):
        measure(model, sites, DATA, loss_fn)
    assert model.cache is None and model.seen.shape == (0, 3)


def test_measuring_does_not_disturb_a_graph_that_the_user_holds():
    model = nn.Sequential(nn.BatchNorm1d(3), *fnn()).double().eval()
    sites = find_sites(model, points())
    loss = loss_fn(model(DATA[0][0]), DATA[0][1])
    measure(model, sites, DATA, loss_fn)
    loss.backward()  # raises if a buffer that the graph saved was written to


def test_all_errors_share_one_base_and_models_stay_usable():
    model, _ = prepared()
    sites = find_sites(model, points())
    again = copy.deepcopy(model)
    for call, error, _ in MEASUREMENTS.values():
        with pytest.raises(error) as caught:
            call(model, sites)
        assert not isinstance(caught.value, SensliError) or str(caught.value).rstrip().endswith((".", "?"))
    assert torch.equal(model(DATA[0][0]), again(DATA[0][0]))
    assert len(measure(model, sites, DATA, loss_fn)) == 2
