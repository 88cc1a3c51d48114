"""`insert`, `undo`, `replay`: the function to the last bit, the optimizer along with it, and back again as if nothing had been."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import (
    Block,
    Functional,
    Listed,
    Named,
    alive,
    batches,
    cnn,
    deep,
    fnn,
    images,
    labels,
    loss_fn,
    points,
    residual,
    snapshot,
    untouched,
)
from sensli import History, find_sites, insert, measure, replay, undo
from sensli.errors import FunctionChanged, HistoryError, OptimizerError, UnknownSite

MODELS = {
    "sequential": (fnn, points, {}),
    "named": (Named, points, {}),
    "functional": (Functional, points, {}),
    "list and dict": (Listed, points, {}),
    "tanh": (lambda: Named(nn.Tanh), points, {}),
    "blocks": (residual, points, {}),
    "parametric": (lambda: fnn(nn.GELU), points, {"form": "parametric"}),
    **{f"cnn {d}d": (lambda d=d: cnn(d, norm=True), lambda n=6, d=d: images(n, d), {}) for d in (1, 2, 3)},
    "residual cnn": (lambda: cnn(2, nn.SiLU, groups=2), images, {}),
}


def train(model, optimizer, data, steps=3):
    for x, y in itertools.islice(itertools.cycle(data), steps):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("name", MODELS)
def test_output_does_not_move_by_a_bit_and_the_new_layer_learns(name):
    make, data, options = MODELS[name]
    model = make().eval()
    x, y = data(6), labels(6)
    before = model(x)
    for site in find_sites(model, x, **options):
        growth = insert(model, site, check=(x, y))
        assert torch.equal(model(x), before)
        loss_fn(model(x), y).backward()
        assert any(model.get_parameter(p).grad.abs().max() > 0 for p in growth.parameters if p.endswith("weight"))
    assert model(x).dtype == torch.float64


@pytest.mark.parametrize("name", MODELS)
def test_undo_gives_the_model_and_the_optimizer_back_to_the_bit(name):
    make, data, options = MODELS[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    train(model, optimizer, [(data(6), labels(6))])
    scheduler.step()
    sites = find_sites(model, data(6), **options)
    before = snapshot(model, optimizer)
    rates = copy.deepcopy(scheduler.state_dict())
    grown = [insert(model, s, optimizer=optimizer, scheduler=scheduler, lr_factor=0.7) for s in (*sites, *sites)]
    for growth in reversed(grown):
        undo(model, growth, optimizer=optimizer, scheduler=scheduler)
    assert snapshot(model, optimizer) == before
    assert scheduler.state_dict() == rates
    assert [site.find(model)[0] for site in sites] == [site.path for site in sites]


def test_undo_after_steps_takes_the_layer_and_its_moments_out():
    model, data = Named(), batches()
    optimizer = torch.optim.Adam(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    growth = insert(model, find_sites(model, points())[0], optimizer=optimizer)
    train(model, optimizer, data)
    assert len(optimizer.state) == len(names) + len(growth.parameters)
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if name not in growth.parameters}
    undo(model, growth, optimizer=optimizer)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(p, kept[growth.renames.get(name, name)]) for name, p in model.named_parameters())
    assert len(optimizer.state) == len(optimizer.param_groups[0]["params"]) == len(names)
    train(model, optimizer, data)


def test_undo_is_refused_out_of_order_and_on_the_wrong_model():
    model, other = fnn(), fnn()
    sites = find_sites(model, points())
    first, second = insert(model, sites[0]), insert(model, sites[1])
    with untouched(model):
        with pytest.raises(HistoryError, match=r"the last growth .* is number 2 .*reverse order"):
            undo(model, first)
        with pytest.raises(HistoryError, match="nothing to undo"):
            undo(other, first)
        with pytest.raises(OptimizerError, match=r"must be a torch\.optim\.Optimizer"):
            undo(model, second, optimizer="adam")
    undo(model, second)
    with pytest.raises(HistoryError, match="is number 1"):
        undo(model, second)


def test_existing_names_stay_where_the_container_allows_it_and_renames_are_recorded():
    model = fnn()
    names = set(dict(model.named_parameters()))
    growth = insert(model, find_sites(model, points())[0])
    assert names < set(dict(model.named_parameters())) and not growth.renames
    assert growth.name == "grown1" and growth.parameters == ("grown1.linear.weight", "grown1.linear.bias")
    functional = Functional()
    growth = insert(functional, find_sites(functional, points())[0])
    assert growth.renames == {"fc2.weight": "fc2.anchor.weight", "fc2.bias": "fc2.anchor.bias"}
    assert set(growth.renames.values()) < set(dict(functional.named_parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_a_place_grows_again_and_again(name):
    make, data, options = MODELS[name]
    model = make().eval()
    x = data(6)
    before = model(x)
    site = find_sites(model, x, **options)[0]
    grown = [insert(model, site) for _ in range(3)]
    assert [growth.number for growth in grown] == [1, 2, 3] and len({growth.name for growth in grown}) == 3
    assert torch.equal(model(x), before)
    for growth in grown:
        for parameter in growth.parameters:
            assert model.get_parameter(parameter) is not None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_replay_builds_the_architecture_and_the_state_dict_fits(name):
    make, data, options = MODELS[name]
    model = make().eval()
    x = data(6)
    history = History()
    for turn in range(3):
        sites = find_sites(model, x, **options)
        history.append(insert(model, sites[turn % len(sites)]))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    again = replay(make().eval(), History.from_json(history.to_json()))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    assert list(again.state_dict()) == list(model.state_dict())
    assert [site.path for site in find_sites(again, x, **options)] == [
        s.path for s in find_sites(model, x, **options)
    ]  # fmt: skip


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.act1 = nn.Linear(3, 2)

    def forward(self, x):
        return self.act1(x)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: fnn(), "does not fit"),
        (Other, "fc1.weight had the shape"),
        (lambda: alive(_wider()), r"fc1.weight had the shape \(4, 3\), here \(7, 3\)"),
    ],
)
def test_replay_on_another_architecture_is_refused_and_leaves_the_model_as_it_was(make, text):
    grown = Named()
    history = History([insert(grown, site) for site in find_sites(grown, points())])
    model = make()
    with untouched(model), pytest.raises(HistoryError, match=text):
        replay(model, history)
    with untouched(grown), pytest.raises(HistoryError, match="has grown already"):
        replay(grown, history)


def _wider():
    model = Named()
    model.fc1, model.fc2 = nn.Linear(3, 7), nn.Linear(7, 5)
    return model


def test_replay_of_a_history_with_a_hole_is_refused():
    grown = deep()
    history = History([insert(grown, site) for site in find_sites(grown, points())])
    model = deep()
    with untouched(model), pytest.raises(HistoryError, match="missing from the history"):
        replay(model, History(history[1:]))


@pytest.mark.parametrize("name", MODELS)
def test_grown_models_are_copied_and_pickled(name):
    make, data, options = MODELS[name]
    model = make().eval()
    x = data(6)
    for site in find_sites(model, x, **options):
        insert(model, site)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), model(x))
        history = len(find_sites(again, x, **options))
        assert history == len(find_sites(model, x, **options))


def test_a_module_with_a_copy_of_its_own_does_not_hide_its_chain():
    class Proud(nn.Tanh):
        def __deepcopy__(self, memo):
            return Proud()

    model = Named(Proud)
    sites = find_sites(model, points(), where=lambda site: site.path == "act1")
    name = insert(model, sites[0]).name
    assert copy.deepcopy(model).get_submodule(name) is not None
    assert model.act1.anchor.training == model.act1.training


def test_a_site_known_by_its_path_alone_finds_its_place_after_growths():
    model, x = Named(), points()
    before, site = model(x), copy.deepcopy(find_sites(model, points())[0])
    grown = [insert(model, site) for _ in range(3)]
    assert [growth.name for growth in grown] == ["act1.grown1", "act1.grown2", "act1.grown3"]
    assert torch.equal(model(x), before)
    assert list(replay(Named(), History(grown)).state_dict()) == list(model.state_dict())


class Scaled(nn.Module):
    """Blocks in a list whose loop adds the skip: the list grows, and the whole can be wrapped."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))])

    def forward(self, x):
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return x


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scaled, self.b = nn.Linear(3, 4), Scaled(), nn.Linear(4, 2)
        alive(self)

    def forward(self, x):
        return self.b(self.scaled(self.a(x)))


@pytest.mark.parametrize("by_path", [False, True])
def test_a_site_inside_a_module_that_was_wrapped_since_is_named_as_it_is_today(by_path):
    model, x = Whole(), points()
    before = model(x)
    around = find_sites(model, x, form="residual")[0]
    (inside,) = find_sites(model, x)
    assert (around.path, inside.path) == ("scaled", "scaled.blocks.0")
    inside = pickle.loads(pickle.dumps(inside)) if by_path else inside
    growths = [insert(model, around), insert(model, inside)]
    assert growths[1].name in dict(model.named_modules())
    assert all(name in dict(model.named_parameters()) for name in growths[1].parameters)
    assert torch.equal(model(x), before)
    for growth in reversed(growths):
        undo(model, growth)
    assert torch.equal(model(x), before)


def test_hooks_of_the_user_stay_on_their_module_and_go_on():
    model, x = Named(), points()
    seen = []
    model.act1.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    model.fc2.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))
    before = model(x)
    for site in find_sites(model, x):
        growth = insert(model, site)
    seen.clear()
    assert torch.equal(model(x), before) and seen == ["ReLU"]
    undo(model, growth)
    assert torch.equal(model(x), before)


def test_attributes_of_a_wrapped_module_are_still_there():
    model = Functional()
    model.fc2.note = "mine"
    insert(model, find_sites(model, points())[0])
    assert model.fc2.note == "mine" and model.fc2.out_features == 5 and model.fc2.weight.shape == (5, 4)
    with pytest.raises(AttributeError, match="nothing"):
        model.fc2.nothing  # noqa: B018


def test_the_new_layer_takes_type_device_and_mode_of_its_place():
    for dtype in (torch.float32, torch.bfloat16):
        model = cnn(norm=True).to(dtype).eval()
        x = images().to(dtype)
        before = model(x)
        growth = insert(model, find_sites(model, x)[0], check=x)
        new = model.get_submodule(growth.name)
        assert {p.dtype for p in new.parameters()} == {dtype} and not any(m.training for m in new.modules())
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x.flip(1), lambda x: x[:, ::2]])
def test_not_even_the_layout_of_the_values_moves_a_bit(view):
    model = alive(nn.Sequential(nn.Linear(9, 9), nn.ReLU(), View(view), nn.ReLU(), nn.Linear(9, 2))).eval()
    x = torch.randn(4, 9, 9, dtype=torch.float64)
    before = model(x)
    for site in find_sites(model, x):
        insert(model, site)
        assert torch.equal(model(x), before)


class View(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.view = view

    def forward(self, x):
        return self.view(x)


def test_check_finds_a_function_that_changed_and_puts_everything_back():
    class Branching(nn.Module):
        """Positive in the example, negative on the batch."""

        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)
            self.flip = False
            self.act.register_forward_hook(lambda module, args, output: -output if self.flip else output)
            alive(self)

        def forward(self, x):
            return self.b(self.act(self.a(x)))

    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (site,) = find_sites(model, points())
    model.flip = True
    x, y = points(), labels()
    with untouched(model, optimizer), pytest.raises(FunctionChanged, match="everything was put back"):
        insert(model, site, optimizer=optimizer, lr_factor=0.5, check=(x, y))
    model.flip = False
    insert(model, site, optimizer=optimizer, check=x)


def test_infinite_outputs_are_no_change():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = fnn()

        def forward(self, x):
            y = self.net(x)
            return {"y": y.masked_fill(y > y.mean(), -torch.inf), "odd": y.mean() / 0 - y.mean() / 0, "mask": y > 0}

    model, x = Masked(), points()
    insert(model, find_sites(model, x)[0], check={"x": x})


def test_dropout_and_batch_norm_under_check_in_training_mode():
    model = nn.Sequential(cnn(norm=True)[0], nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 2)).double().train()
    x, y = images(), labels(5)
    (site, _) = find_sites(model, x)
    state, buffers = torch.get_rng_state(), {name: b.clone() for name, b in model.named_buffers()}
    growth = insert(model, site, check=(x, y))
    assert torch.equal(torch.get_rng_state(), state)
    now = dict(model.named_buffers())
    assert all(torch.equal(b, now[name]) for name, b in buffers.items())
    assert (
        model.get_submodule(growth.name).norm.num_batches_tracked == 0
    )  # the check leaves the new norm as it was, too


def test_a_frozen_new_layer_changes_no_trajectory():
    runs = []
    data = batches()
    for grows in (False, True):
        torch.manual_seed(1)
        model = Named()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, data)
        if grows:
            growth = insert(model, find_sites(model, points())[0], optimizer=optimizer)
            for name in growth.parameters:
                model.get_parameter(name).requires_grad_(False)
        train(model, optimizer, data, steps=5)
        runs.append(model(data[0][0]))
    assert torch.equal(*runs)


@pytest.mark.parametrize("sites", ["shuffled", "reversed"])
def test_all_sites_can_be_filled_in_any_order(sites):
    x = points()
    for make in (deep, Named, Functional, residual):
        model = make().eval()
        before = model(x)
        found = list(find_sites(model, x))
        order = found[::-1] if sites == "reversed" else [found[i] for i in torch.randperm(len(found))]
        for site in order:
            insert(model, site)
        assert torch.equal(model(x), before)
        assert len(measure(model, find_sites(model, x), [(x, labels())], loss_fn)) >= len(found)


def test_a_site_of_another_model_or_one_that_is_gone_is_refused():
    model, other = fnn(), fnn()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    site = find_sites(model, points())[0]
    with untouched(other, optimizer), pytest.raises(UnknownSite, match=r"not a site of this Sequential.*find_sites"):
        insert(other, site, optimizer=optimizer)
    grown = insert(model, site)
    inner = find_sites(model, points(), where=lambda s: s.path.startswith(grown.name))[0]
    undo(model, grown)
    with untouched(model), pytest.raises(UnknownSite):
        insert(model, inner)
    insert(model, site)  # while its own place is there it stays valid


def test_the_wrapped_functional_model_still_counts_as_blocks_in_a_list():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(3) for _ in range(2)]), nn.Linear(3, 2)
            self.double()

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return F.log_softmax(self.head(x), 1)

    model, x = Looped(), points()
    before = model(x)
    for expected in (3, 4, 5):
        sites = find_sites(model, x, form="residual")
        assert len(sites) == expected
        insert(model, sites[1])
    assert torch.equal(model(x), before) and len(model.blocks) == 2
