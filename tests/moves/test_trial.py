"""Only places that hold are offered: forwards that count, index, tap, add, scale or ask for classes, and what happens only in training."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from models import Block, alive, untouched
from sensli import Sites, find_sites, insert, measure, undo
from sensli.modules.running import run, tensors, undraw_hooks
from sensli.moves.stacking import find_stack_copies


def module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A model from its parts and a forward function of (self, x)."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

    return Model().double()


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outputs(model: nn.Module, x: Any, training: bool = False) -> list[Tensor]:
    """All that it returns. What a module draws depends on the module alone, so that what a new one draws moves nothing else."""
    state = copy.deepcopy(model.state_dict())
    was = model.training
    model.train(training)
    grown = [m for m in model.modules() if "sensli_growth" in vars(m)]
    own = [
        m
        for m in model.modules()
        if type(m).__name__ != "Chain" and not any(m is part for g in grown for part in g.modules())
    ]
    handles = [h for layer in grown for h in undraw_hooks(layer)]
    handles += [m.register_forward_pre_hook(lambda *_, n=n: torch.manual_seed(n) and None) for n, m in enumerate(own)]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        found = [t.clone() for t in tensors(run(model, copy.deepcopy(x)))]
    for handle in handles:
        handle.remove()
    model.load_state_dict(state)
    model.train(was)
    return found


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return sum(t.square().mean() + t.mean() for t in tensors(output) if t.is_floating_point())


def assert_sound(model: nn.Module, x: Any, **options: Any) -> Sites:
    """Every site that is offered keeps all outputs to the bit in both modes and has the merit of the network that really has the layer."""
    torch.manual_seed(0)
    model.eval()
    with untouched(model):
        sites = find_sites(model, x, **options)
    modes = (False, True)
    before = [outputs(model, x, training) for training in modes]
    for site in sites:
        growth = insert(model, site)
        after = [outputs(model, x, training) for training in modes]
        undo(model, growth)
        for training, old, new in zip(modes, before, after, strict=True):
            assert len(new) == len(old) and all(map(torch.equal, old, new)), (str(site), training)
    if sites:
        batches = [(x, torch.zeros(2))]
        found = measure(model, sites, batches, loss_fn, norm="frobenius")
        for site, merit in zip(sites, found, strict=True):
            (new,), _ = oracle.gradients(model, [site], batches, loss_fn)
            assert merit.value == pytest.approx(new.square().sum().item(), rel=1e-9, abs=1e-18), str(site)
    return sites


def places(sites: Sites) -> list[tuple[str, str]]:
    return [(site.side, site.path) for site in sites]


def blocks(number: int = 3, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList([Block(width) for _ in range(number)])


# --- lists of blocks whose loops know more than the order ---


def with_hidden(self: Any, x: Tensor) -> Tensor:
    hidden = []
    for block in self.blocks:
        x = block(x)
        hidden.append(x)
    return self.head(x + hidden[-2])


def last_apart(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks[:-1]:
        x = block(x)
    return self.head(self.blocks[-1](x).tanh())


def special_end(self: Any, x: Tensor) -> Tensor:
    for i, block in enumerate(self.blocks):
        x = block(x)
        if i == len(self.blocks) - 1:
            x = 2 * x
    return self.head(x)


def tap_after_first(self: Any, x: Tensor) -> Tensor:
    for i, block in enumerate(self.blocks):
        x = block(x)
        if i == 0:
            tap = x
    return self.head(x) + self.head(tap).tanh()


def positions(self: Any, x: Tensor) -> Tensor:
    for i, block in enumerate(self.blocks):
        x = block(x + 0.1 * i)
    return self.head(x)


def scaled_by_number(self: Any, x: Tensor) -> Tensor:
    for i, block in enumerate(self.blocks):
        x = block(x) * ((1 + i) / len(self.blocks))
    return self.head(x)


def only_in_training(self: Any, x: Tensor) -> Tensor:
    for i, block in enumerate(self.blocks):
        x = block(x)
        if self.training:
            x = x / (1 + i)
    return self.head(x)


def all_states(self: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    states = [x := block(x) for block in self.blocks]
    return self.head(x), states


LOOPS = [
    with_hidden,
    last_apart,
    special_end,
    tap_after_first,
    positions,
    scaled_by_number,
    only_in_training,
    all_states,
]


@pytest.mark.parametrize("forward", LOOPS, ids=lambda f: f.__name__)
def test_loops_that_count_index_or_tap(forward: Callable[..., Any]) -> None:
    model = module(forward, blocks=blocks(), head=nn.Linear(4, 2))
    sites = assert_sound(model, points(5, 4))
    assert sites  # around the blocks, where their list cannot take one
    insert(model, sites[-1])
    assert_sound(model, points(5, 4))


# --- loops that add the skip themselves ---


class Branch(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(width, 8), nn.Dropout(0.2), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))


def added(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = x + block(x)
    return self.head(x)


def added_scaled(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = x + 0.5 * F.dropout(block(x), 0.1, self.training)
    return self.head(x)


def added_bent(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = x + torch.tanh(block(x))
    return self.head(x)


def added_by_length(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = x + block(x) / len(self.blocks)
    return self.head(x)


@pytest.mark.parametrize(
    ("forward", "container", "make"),
    [
        (added, nn.ModuleList, Branch),
        (added, lambda parts: nn.Sequential(*parts), lambda: nn.Linear(4, 4)),
        (added_scaled, nn.ModuleList, lambda: nn.Linear(4, 4)),
        (added_bent, lambda parts: nn.Sequential(*parts), Branch),
    ],
    ids=["list of branches", "sequence of linear", "scaled", "bent"],
)
def test_a_loop_that_adds_the_skip_grows_between_its_blocks(forward: Any, container: Any, make: Any) -> None:
    model = module(forward, blocks=container([make() for _ in range(3)]), head=nn.Linear(4, 2))
    x = points(5, 4)
    sites = assert_sound(model, x)
    assert places(sites) == [("after", f"blocks.{i}") for i in range(3)]
    assert all(site.move.form == "twin" for site in sites)
    growth = insert(model, sites[1])
    assert len(model.blocks) == 4
    assert places(assert_sound(model, x)) == [("after", f"blocks.{key}") for key in model.blocks._modules]
    before = outputs(model, x)
    loss_fn(model(x), x).backward()
    names = [f"{growth.name}.{name}" for name in sites[1].move.measured]
    assert all(dict(model.named_parameters())[name].grad.any() for name in names)
    assert all(map(torch.equal, before, outputs(model, x)))


def test_a_loop_that_divides_by_its_length_is_looked_into_instead() -> None:
    model = module(added_by_length, blocks=nn.ModuleList([Branch() for _ in range(3)]), head=nn.Linear(4, 2))
    sites = assert_sound(model, points(5, 4))
    assert sites and not any(site.move.form == "twin" for site in sites)


# --- forwards that look at their modules ---


def by_class(self: Any, x: Tensor) -> Tensor:
    for layer in self.net:
        x = layer(x)
        if isinstance(layer, nn.ReLU):
            x = x * 2
    return x


def by_index(self: Any, x: Tensor) -> Tensor:
    return self.net(x) + self.net[2].weight.sum()


def by_length(self: Any, x: Tensor) -> Tensor:
    return self.net(x) * len(self.net)


def by_slice(self: Any, x: Tensor) -> Tensor:
    return self.net(x) + self.net[:2](x).sum()


@pytest.mark.parametrize("forward", [by_class, by_index, by_length, by_slice], ids=lambda f: f.__name__)
def test_forwards_that_ask_for_a_class_count_index_or_slice(forward: Callable[..., Any]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    sites = assert_sound(module(forward, net=net), points(5, 4))
    reasons = dict(sites.skipped)
    assert len(sites) + len(reasons) >= 2
    if forward is by_class:  # after the ReLUs nothing holds, after the layers the residual form does
        assert places(sites) == [("after", "net.0"), ("after", "net.2")]
        assert "checks their class" in reasons["net.1"] and "net.1: the model's output changes by" in sites.explain()


# --- what happens only in training ---


def noisy(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    if self.training:
        h = h + 0.1 * torch.randn_like(h)
    return self.b(h)


def alpha(self: Any, x: Tensor) -> Tensor:
    return self.b(F.alpha_dropout(F.relu(self.a(x)), 0.3, self.training))


@pytest.mark.parametrize("forward", [noisy, alpha], ids=lambda f: f.__name__)
def test_negative_values_in_training_mode_get_the_residual_form(forward: Callable[..., Any]) -> None:
    model = module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    (site,) = assert_sound(model, points(5, 4))
    assert site.move.form == "residual"


def test_the_reason_tells_what_the_trial_saw() -> None:
    in_training = find_sites(module(noisy, a=nn.Linear(4, 4), b=nn.Linear(4, 2)), points(5, 4), form="relu")
    assert not in_training and "would change the values in training mode" in dict(in_training.skipped)["b"]
    block = Block(4)
    model = module(
        lambda s, x: s.head(s.other[0](x)), blocks=nn.ModuleList([block]), other=[block], head=nn.Linear(4, 2)
    )
    never = find_sites(model, points(5, 4), form="twin")
    assert not never and "did not run when it was tried" in dict(never.skipped)["blocks.0"]


def test_alpha_dropout_as_a_module() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.AlphaDropout(0.3), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert len(assert_sound(net.double(), points(5, 4))) == 2


class Dropping(nn.Module):
    """Dropout on the main path: a twin must not drop once more."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + self.body(torch.tanh(x)))


def test_dropout_on_the_main_path_is_not_doubled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Dropping(), Dropping(), nn.Linear(4, 2)).double()
    assert_sound(model, points(5, 4))


# --- values that are read elsewhere, modules with two names ---


def in_place_and_read(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    g = self.act(h)  # h is the same tensor now
    return self.b(g) + self.c(h)


def identity_and_read(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).relu()
    return self.b(self.act(h)) + self.c(h)


def test_values_that_are_read_elsewhere_too() -> None:
    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 2), "c": nn.Linear(4, 2)}
    for forward, act in ((in_place_and_read, nn.ReLU(inplace=True)), (identity_and_read, nn.Dropout(0.0))):
        assert_sound(module(forward, act=act, **copy.deepcopy(parts)), points(5, 4))


def test_a_module_under_two_names() -> None:
    block = Block(4)
    model = module(
        lambda s, x: s.head(s.chosen(s.blocks[1](x))),
        blocks=nn.ModuleList([block, Block(4)]),
        chosen=block,
        head=nn.Linear(4, 2),
    )
    for site in assert_sound(model, points(5, 4)):
        growth = insert(model, site)
        calls: list[int] = []
        handle = model.get_submodule(growth.name).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(points(5, 4))
        handle.remove()
        undo(model, growth)
        assert calls == [1], str(site)


def test_no_layer_is_as_wide_as_the_example_is_long() -> None:
    def scores(self: Any, x: Tensor) -> Tensor:
        return self.out(self.act(self.q(x) @ self.k(x).mT) @ self.v(x))

    linear = {name: nn.Linear(4, 4) for name in "qkv"}
    model = module(scores, **linear, act=nn.ReLU(), out=nn.Linear(4, 2))
    for x in (points(2, 7, 4), points(7, 4)):
        assert all(site.move.width == 4 for site in assert_sound(model, x))

    def gram(self: Any, x: Tensor) -> Tensor:
        h = self.q(x)
        return self.out(self.act(h @ h.mT) @ h)

    assert all(
        site.move.width == 4
        for site in assert_sound(module(gram, q=nn.Linear(4, 4), act=nn.ReLU(), out=nn.Linear(4, 2)), points(6, 4))
    )


def test_weights_are_no_activations() -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, weight: Tensor) -> Tensor:
            return self.act(weight) + 0.1

    model = alive(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    nn.utils.parametrize.register_parametrization(model[2], "weight", Positive())
    sites = assert_sound(model, points(5, 4))
    assert places(sites) == [("after", "1"), ("after", "3")]
    made = module(
        lambda s, x: F.linear(F.linear(x, s.act(s.raw.weight)), s.raw.weight), raw=nn.Linear(4, 4), act=nn.ReLU()
    )
    assert "weight" in dict(find_sites(made, points(5, 4)).skipped)["act"]


def test_a_scatter_is_not_a_slice() -> None:
    def scattered(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(torch.slice_scatter(h, self.c(x)[:, :2], 1, 0, 2))

    model = module(scattered, a=nn.Linear(4, 4), b=nn.Linear(4, 2), c=nn.Linear(4, 4))
    nn.init.constant_(model.c.bias, 3.0)  # positive on the example, by chance
    sites = assert_sound(model, points(5, 4))
    assert all(site.move.form == "residual" for site in sites)


def test_a_model_that_refuses_inputs_with_gradients() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(torch.from_numpy(x.numpy() * 2))

    model = module(forward, net=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert len(assert_sound(model, points(5, 4))) == 1


def test_attributes_that_are_set_on_a_wrapped_module_reach_it() -> None:
    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature, self._private = 1.0, 1.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x / self.temperature / self._private)

    model = module(lambda s, x: s.b(s.act(s.a(x))), a=nn.Linear(4, 4), act=Sharp(), b=nn.Linear(4, 2))
    x = points(5, 4)
    wanted = copy.deepcopy(model)
    wanted.act.temperature, wanted.act._private = 0.5, 2.5
    insert(
        model, find_sites(model, x, where=lambda site: site.path == "act" and site.side == "after", form="residual")[0]
    )
    act = model.act
    assert type(act).__name__ == "Chain"
    act.temperature, act._private = 0.5, 2.5
    assert torch.equal(model(x), wanted(x))
    del act.temperature
    assert not hasattr(act, "temperature")


def test_tensors_cached_with_their_graph_in_a_dict() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not self.training:
            self.cache.setdefault("bias", [self.table.weight[0] * 2])
        bias = self.table.weight[0] * 2 if self.training else self.cache["bias"][0]
        return self.net(x + bias)

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = module(forward, net=net, table=nn.Embedding(3, 4), cache={})
    model.eval()
    model(points(5, 4))
    assert model.cache["bias"][0].grad_fn is not None
    assert len(find_sites(model, points(5, 4))) == 1


# --- calls with further arguments ---


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.slow
def test_torchs_transformer_grows_again_and_again(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, dropout=0.1)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    for model, x in ((encoder, points(2, 5, 8)), (encoder, {"src": points(2, 5, 8), "mask": mask})):
        grown = copy.deepcopy(model).eval()
        before = outputs(grown, x)
        for number in range(2 if isinstance(x, dict) else 3):
            sites = find_sites(grown, x)
            assert not any("ResidualLayer" in str(site) for site in sites)
            insert(grown, sites[number % len(sites)])
            assert all(map(torch.equal, before, outputs(grown, x)))
    both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, norm_first=norm_first).double().eval()
    x = (points(2, 5, 8), points(2, 4, 8))
    before = outputs(both, x)
    for number in range(2):
        insert(both, find_sites(both, x)[number])
        assert all(map(torch.equal, before, outputs(both, x)))


# --- one function, several spellings ---


class Spelled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.c1, self.c2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 12), nn.Linear(12, 3)
        if how == "modules":
            self.a1, self.p1, self.a2, self.p2, self.a3 = (
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.ReLU(),
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "modules":
            x = self.p2(self.a2(self.c2(self.p1(self.a1(self.c1(x))))))
            return self.fc2(self.a3(self.fc1(x.flatten(1))))
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def test_the_spellings_of_one_network_give_the_same_layers_with_the_same_merits() -> None:
    found = {}
    for how in ("modules", "functions"):
        torch.manual_seed(0)
        model = Spelled(how).double()
        sites = assert_sound(model, x := torch.ones(2, 1, 16, 16).double().cumsum(2) / 16)
        found[how] = [
            (s.kind, s.parameters, m.value)
            for s, m in zip(sites, measure(model, sites, [(x, torch.zeros(2))], loss_fn), strict=True)
        ]
    modules, functions = found["modules"], found["functions"]
    assert [kind for kind, _, _ in modules] == [kind for kind, _, _ in functions] == ["conv", "conv", "linear"]
    assert [n for _, n, _ in modules] == [n for _, n, _ in functions]
    assert functions[1][2] == pytest.approx(modules[1][2], rel=1e-9)  # before the ReLU and after it: the same layer
    assert functions[2][2] == pytest.approx(modules[2][2], rel=1e-9)


def test_a_kernel_has_no_entry_that_never_lies_on_the_map() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 7), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)
    ).double()
    sites = assert_sound(net, points(3, 1, 7, 7))
    assert [site.move.kernel for site in sites] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_beside_a_batch_norm_a_layer_has_one(kind: str) -> None:
    if kind == "linear":
        net = [
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.Linear(6, 2),
        ]
        x = points(5, 4)
    else:
        net = [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.SiLU(),
            nn.Conv2d(4, 2, 1),
        ]
        x = points(3, 2, 6, 6)
    model = nn.Sequential(*net).double()
    sites = assert_sound(model, x)
    assert all("BatchNorm" in str(site) for site in sites) and len(sites) == 2
    for training in (False, True):  # the merit in training mode too: with the statistics of the batch
        model.train(training)
        batches = [(x, torch.zeros(2))]
        for site, merit in zip(sites, measure(model, sites, batches, loss_fn, norm="frobenius"), strict=True):
            (new,), _ = oracle.gradients(model, [site], batches, loss_fn)
            assert merit.value == pytest.approx(new.square().sum().item(), rel=1e-9)
    growth = insert(model, sites[0])
    assert sum(p.numel() for n, p in model.named_parameters() if n in growth.parameters) == sites[0].parameters
    assert_sound(model, x)
    assert "ReLU" in str(find_sites(model, x, form="relu")[0]) and "BatchNorm" not in str(
        find_sites(model, x, form="relu")[0]
    )


# --- nothing stays behind ---


def test_a_search_leaves_no_tensor_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(4), Block(4), nn.Linear(4, 2)).double()
    x = points(5, 4)

    def living() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    measure(model, find_sites(model, x), [(x, torch.zeros(2))], loss_fn)
    one = living()
    for _ in range(10):
        measure(model, find_sites(model, x), [(x, torch.zeros(2))], loss_fn)
    assert living() <= one


class _Halved(torch.autograd.Function):
    """The identity, with half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.5


def test_a_list_whose_gradients_depend_on_the_position_takes_no_block() -> None:
    """The output stays, but a block more would move the place from which on gradients are halved."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(x)
                if number >= 2:
                    x = _Halved.apply(x)
            return self.head(x)

    torch.manual_seed(0)
    sites = find_sites(Model(), torch.randn(4, 8))
    assert sites and all(site.point.place is None for site in sites)


# --- what fails is said, and memory that runs out is an error ---


def frozen_before_in_place(trained: bool = False) -> nn.Module:
    """Trains, because nothing is saved for the frozen part; a ReLU that is trained saves what the one in place overwrites."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.head(self.again(self.mid(self.act(self.first(x)))))

    first = nn.Linear(6, 6).requires_grad_(trained)
    parts = {"act": nn.ReLU(), "mid": nn.Dropout(0.0), "again": nn.ReLU(inplace=True), "head": nn.Linear(6, 3)}
    return module(forward, first=first, **parts)


def test_a_layer_between_a_frozen_part_and_an_operation_in_place_can_be_trained() -> None:
    x = points(4, 6)
    places = find_sites(frozen_before_in_place(), x)
    assert [str(site) for site in places] == [
        "Residual(Linear(6, 6), ReLU) after act",
        "Linear(6, 6) + ReLU after again",
    ]
    for index in range(len(places)):
        model = frozen_before_in_place()
        before = model(x)
        insert(model, find_sites(model, x)[index])
        assert torch.equal(model(x), before)
        model(x).square().sum().backward()
    (refusal,) = find_sites(frozen_before_in_place(), x, form="relu").skipped
    assert refusal.path == "act" and refusal.reason.startswith(
        "the backward pass fails with a layer there (RuntimeError: one of the variables needed for gradient"
    )
    # Where nothing is frozen, the model itself fails.
    (note,) = find_sites(frozen_before_in_place(trained=True), x).notes
    assert "was not tried: autograd fails on the model itself (RuntimeError: one of the variables" in note


def test_a_layer_that_sends_gradients_through_an_operation_in_place_is_tried_alone() -> None:
    """With all layers at once the one behind the sigmoid stands between it and the hardtanh that overwrites it."""
    parts = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid(), nn.Hardtanh(inplace=True), nn.Linear(4, 2)]
    model, x = nn.Sequential(*parts).double(), points(3, 4)
    model[:3].requires_grad_(False)
    model(x).sum().backward()
    sites = find_sites(model, x)
    assert [site.path for site in sites] == ["3", "4"]
    assert dict(sites.skipped)["1"].startswith("the backward pass fails with a layer there")
    for site in sites:
        grown = copy.deepcopy(model)
        insert(grown, site.in_model(grown))
        grown(x).sum().backward()


def test_a_layer_before_a_frozen_one_whose_input_is_overwritten_later() -> None:
    """A frozen map saves no input; a new one before it does."""

    def forward(self: Any, x: Tensor) -> Any:
        hidden = F.gelu(self.first(x))
        out = self.frozen(hidden)
        hidden.mul_(2)
        return self.head(out + hidden)

    parts = {"first": nn.Linear(4, 4), "frozen": nn.Linear(4, 4).requires_grad_(False), "head": nn.Linear(4, 2)}
    x, model = points(3, 4), module(forward, **parts)
    model(x).sum().backward()
    for site in find_sites(model, x):
        grown = copy.deepcopy(model)
        insert(grown, site.in_model(grown))
        grown(x).sum().backward()


def test_twins_of_frozen_blocks_that_work_in_place_can_be_trained() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x))).add_(x)

    x = points(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), InPlace(), InPlace(), nn.Linear(4, 2)).double()
    model[1].requires_grad_(False)
    sites = find_sites(model, x)
    assert {site.kind for site in sites} == {"block"} and len(sites) == 3
    for site in sites:
        grown = copy.deepcopy(model)
        insert(grown, site.in_model(grown))
        grown(x).sum().backward()
        assert torch.equal(grown(x), model(x))


def test_it_is_said_that_training_mode_or_gradients_were_not_tried() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if self.training:
            raise ValueError("wants labels")
        return self.head(torch.tanh(self.first(x)))

    model = module(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 2))
    for grow in ("layers", "units"):
        for samples in (1, 2, 3):
            (note,) = find_sites(model, points(samples, 4), what=grow).notes
            assert note.startswith(
                "training mode was not tried: the model does not run its example in training mode (ValueError: wants labels)."
            )
    shown = find_sites(model, points(1, 4))
    assert shown.explain().endswith(f"note: {note}") and note in shown._repr_html_()
    assert shown.to_dict()["notes"] == [note]

    class NoWayBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise KeyError("nothing")

    parts = {"first": nn.Linear(4, 4), "act": nn.ReLU(), "head": nn.Linear(4, 2)}
    found = find_sites(
        module(lambda self, x: self.head(NoWayBack.apply(self.act(self.first(x)))), **parts), points(2, 4)
    )
    assert len(found) == 1
    assert found.notes == (
        "whether layers get the gradients that are measured was not tried: autograd fails on the model itself (KeyError: 'nothing')",
    )


@pytest.mark.parametrize("grow", ["layers", "units"])
def test_training_mode_is_tried_also_where_one_sample_is_too_few_for_a_norm(grow: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = torch.tanh(self.norm(self.first(x)))
        size = len(list(self.modules())) * len(self.first.weight) if self.training and self.counts else 1
        return self.head(x * size)

    model = module(forward, first=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 2), counts=False)
    found = find_sites(model, points(1, 4), what=grow)
    assert len(found) == 1 and not found.notes
    model.counts = True
    found = find_sites(model, points(1, 4), what=grow)
    assert not found and not found.notes
    assert any("in training mode" in reason or "changes with more" in reason for _, reason in found.skipped)


class _Counted(nn.Module):
    """Runs out of memory at one of its calls, in the forward or in the backward pass."""

    calls, at, way, error = 0, -1, "forward", torch.OutOfMemoryError

    def forward(self, x: Tensor) -> Tensor:
        if _Counted.way == "backward":
            return _CountedBack.apply(x)
        _Counted.count()
        return x * 1

    @staticmethod
    def count() -> None:
        _Counted.calls += 1
        if _Counted.calls == _Counted.at:
            raise _Counted.error("memory ran out")


class _CountedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _Counted.count()
        return gradients[0]


class _Numbered(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.inner, self.counted, self.out = layer_idx, nn.Linear(4, 6), _Counted(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.counted(self.inner(x))))


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("grow", ["layers", "units", "stacks"])
def test_memory_that_runs_out_is_never_taken_for_a_place_that_does_not_fit(grow: str, way: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.counted(self.before(x))))

    blocks = nn.ModuleList(_Numbered(number) for number in range(2))
    model = module(forward, blocks=blocks, before=nn.Linear(4, 4), counted=_Counted(), head=nn.Linear(4, 2))
    model.before.requires_grad_(False)  # so that there is a real backward pass too
    search: Any = find_stack_copies if grow == "stacks" else partial(find_sites, what=grow)
    x = points(2, 4)
    _Counted.calls, _Counted.at, _Counted.way = 0, -1, way
    found = search(model, x)
    assert len(found)
    calls = _Counted.calls
    assert calls or way == "backward"
    for at in range(1, calls + 1):
        _Counted.calls, _Counted.at = 0, at
        _Counted.error = MemoryError if at % 2 else torch.OutOfMemoryError
        with pytest.raises((MemoryError, torch.OutOfMemoryError), match="memory ran out"):
            search(model, x)
    _Counted.at = -1
    assert [str(site) for site in search(model, x)] == [str(site) for site in found]


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(6)], ids=["", "a batch norm after it"])
def test_a_layer_whose_output_would_be_overwritten_after_a_frozen_part_is_refused(norm: Any) -> None:
    """In training a batch norm moves its statistics, which are put back only after the backward pass of the trial."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.o = nn.Linear(6, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 6)
            self.norm, self.head = norm(), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.o(torch.relu_(self.act(self.a(x))))))

    model, x = Net().double(), torch.randn(5, 6, dtype=torch.float64)
    sites = find_sites(model, x)
    assert not any("not tried" in note for note in sites.notes)
    for site in sites:
        growth = insert(model, site)
        model(x).sum().backward()
        undo(model, growth)
