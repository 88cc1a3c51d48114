"""`find_sites`: the right places with the right layers, every refusal with its reason, and no trace on the model."""

import copy
import json
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Block, Functional, Listed, Named, alive, cnn, fnn, images, points, residual, untouched
from sensli import Site, count_flops, find_sites, insert, measure
from sensli.errors import BadExample


def module(forward, **parts):
    """A model from its parts and a forward function of (self, x)."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

    return Model().double()


def lines(model, x, **options):
    return [str(site) for site in find_sites(model, x, **options)]


@pytest.mark.parametrize(
    "make, options, found",
    [
        (fnn, {}, ["Linear(4, 4) + ReLU after 1", "Linear(4, 4) + ReLU after 3"]),
        (Named, {}, ["Linear(4, 4) + ReLU after act1", "Linear(5, 5) + ReLU after act2"]),
        (Listed, {}, ["Linear(4, 4) + ReLU after layers.1", "Linear(4, 4) + ReLU after ends.act"]),
        (Functional, {}, ["Linear(4, 4) + ReLU before fc2", "Linear(5, 5) + ReLU before head"]),
        (lambda: Functional(torch.tanh), {}, ["Residual(Linear(4, 4), Tanh) before fc2", "Residual(Linear(5, 5), Tanh) before head"]),
        (lambda: fnn(nn.Tanh), {}, ["Residual(Linear(4, 4), Tanh) after 1", "Residual(Linear(4, 4), Tanh) after 3"]),
        (lambda: fnn(nn.GELU), {"form": "parametric"}, [f"Parametric(Linear(4, 4), GELU) after {place}" for place in "13"]),
        (fnn, {"form": "residual"}, ["Residual(Linear(4, 4), ReLU) after 1", "Residual(Linear(4, 4), ReLU) after 3"]),
        (residual, {"form": "residual"}, [f"Residual(Linear(3, 3), Tanh) {place}" for place in ("before 1", "after 1", "after 2")]),
        (residual, {}, [f"Twin(Block) {place}" for place in ("before 1", "after 1", "after 2")]),
    ],
)  # fmt: skip
def test_places_and_layers_in_the_order_of_the_data_flow(make, options, found):
    model, x = make(), points()
    with untouched(model):
        assert lines(model, x, **options) == found


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_grow_after_norm_and_relu_before_the_pooling(dims, norm):
    places = ["0.2", "0.6"] if norm else ["0.1", "0.4"]
    found = find_sites(cnn(dims, norm=norm), images(2, dims))
    # beside a batch norm a new layer has one too
    layer = f"Residual(Conv{dims}d(4, 4, 3), BatchNorm{dims}d, ReLU)" if norm else f"Conv{dims}d(4, 4, 3) + ReLU"
    assert [str(site) for site in found] == [f"{layer} after {place}" for place in places]
    assert [site.shape for site in found] == [(4, *[4, 5, 4][:dims]), (4, *[2, 2, 2][:dims])]


def test_groups_and_kernels_follow_the_neighbour_and_kernel_size_decides():
    model = nn.Sequential(
        nn.Conv2d(2, 8, 5, padding=2, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    x = torch.randn(2, 2, 8, 8)
    assert lines(model, x) == ["Conv2d(8, 8, 5, groups=2) + ReLU after 1", "Conv2d(8, 8, 3) + ReLU after 3"]
    assert lines(model, x, kernel_size=1)[1] == "Conv2d(8, 8, 1) + ReLU after 3"


def test_where_takes_a_kind_or_a_callable():
    model = alive(nn.Sequential(cnn()[0], nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = images()
    assert [site.kind for site in find_sites(model, x)] == ["conv", "conv", "linear"]
    assert len(find_sites(model, x, where="conv")) == 2 and len(find_sites(model, x, where="linear")) == 1
    assert [s.path for s in find_sites(model, x, where=lambda site: site.path.endswith("4"))] == ["0.4"]


def skip_twice(self, x):
    return self.c(self.act(self.b(self.act(self.a(x)))))


def three(**more):
    return {"a": nn.Linear(3, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 2), **more}


@pytest.mark.parametrize(
    "make, path, reason, options",
    [
        (lambda: module(skip_twice, **three(act=nn.ReLU())), "act", "called 2 times", {}),
        (lambda: fnn(nn.Tanh), "1", "not idempotent", {"form": "relu"}),
        (lambda: module(lambda s, x: s.b(s.a(x).relu()), a=nn.Linear(3, 4), b=nn.Linear(4, 2), spare=nn.ReLU()), "spare", "not called", {}),
        (lambda: nn.Sequential(*fnn(), nn.ReLU()), "5", "after the last layer", {}),
        (lambda: module(lambda s, x: s.c(s.act(s.a(x)).detach()), **three(act=nn.ReLU())), "act", "no gradient", {}),
        (lambda: module(lambda s, x: s.c(input=F.relu(s.a(x))), a=nn.Linear(3, 4), c=nn.Linear(4, 2)), "c", "by keyword", {}),
        (lambda: module(lambda s, x: s.loop(s.loop(s.loop(x).relu()).relu()), loop=nn.Linear(3, 3)), "loop", "several times", {}),
        (lambda: module(lambda s, x: s.c(s.act(s.a(x.sum(0)))), **three(act=nn.ReLU())), "act", "not a batch", {}),
    ],
)  # fmt: skip
def test_places_that_cannot_grow_are_named_with_the_reason(make, path, reason, options):
    model, x = make().double(), points()
    with untouched(model):
        sites = find_sites(model, x, **options)
    reasons = dict(sites.skipped)
    assert reason in reasons[path]
    assert f"{path}: {reasons[path]}" in sites.explain()
    assert path not in [site.path for site in sites]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        lambda x: F.pad(x, (1, 1), value=-1.0),
        lambda x: x - 0.1,
        lambda x: torch.cat([x, -x], 1),
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda x: F.leaky_relu(x - 0.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layer", ["auto", "relu"])
def test_no_relu_layer_where_values_may_be_negative(between, layer):
    twice = between(torch.zeros(1, 4, 4, 4)).shape[1]
    model = module(
        lambda s, x: s.b(between(F.relu(s.a(x)))), a=nn.Conv2d(2, 4, 3, padding=1), b=nn.Conv2d(twice, 2, 3, padding=1)
    )
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    before = model(x)
    for site in find_sites(model, x, form=layer):
        assert site.move.form == "residual"
        insert(model, site)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), lambda x: F.pad(x, (1, 1)), lambda x: F.dropout(x, 0.5, False),
        lambda x: x.permute(0, 1, 3, 2), lambda x: torch.cat([x, x.relu()], 1)[:, :4],
    ],
)  # fmt: skip
def test_after_pooling_and_changes_of_shape_values_are_still_those_of_a_relu(between):
    model = module(lambda s, x: s.b(between(F.relu(s.a(x)))), a=nn.Conv2d(2, 4, 3, padding=1), b=nn.Conv2d(4, 2, 1))
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    before = model(x)
    (site,) = find_sites(model, x)
    assert (site.move.form, site.side, site.path) == ("relu", "before", "b")
    insert(model, site)
    assert torch.equal(model(x), before)


def test_blocks_grow_between_and_never_inside():
    model = residual(3)
    assert [(s.side, s.path) for s in find_sites(model, points())] == [
        ("before", "1"), ("after", "1"), ("after", "2"), ("after", "3"),
    ]  # fmt: skip
    looped = module(
        lambda s, x: [x := block(x) for block in s.blocks] and s.head(x),
        blocks=nn.ModuleList([Block(3), Block(3)]),
        head=nn.Linear(3, 2),
    )
    assert [(s.side, s.path) for s in find_sites(looped, points())] == [
        ("before", "blocks.0"), ("after", "blocks.0"), ("after", "blocks.1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "make", [lambda: fnn(nn.Tanh), lambda: Named(nn.Tanh), lambda: Functional(torch.tanh), residual]
)
def test_an_inserted_residual_layer_is_a_block_too(make):
    model, x = make(), points()
    for _ in range(3):
        count = len(find_sites(model, x))
        growth = insert(model, find_sites(model, x)[0])
        again = find_sites(model, x)
        assert len(again) == count + 1
        assert not any(site.path.startswith(growth.name + ".") for site in again)


def test_a_body_that_holds_a_stack_is_not_taken_for_a_block():
    body = module(lambda s, x: s.blocks(x), blocks=nn.Sequential(Block(3), Block(3), Block(3)))
    model = nn.Sequential(nn.Linear(3, 3), body, nn.Linear(3, 2)).double()
    places = [("before", "0"), ("after", "0"), ("after", "1"), ("after", "2")]
    assert [(s.side, s.path) for s in find_sites(model, points())] == [(side, f"1.blocks.{n}") for side, n in places]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(3, 1, 8, batch_first=True), 2, enable_nested_tensor=False
    )
    model = nn.Sequential(nn.Linear(3, 3), encoder, nn.Linear(3, 2)).double()
    found = find_sites(model, torch.randn(2, 5, 3, dtype=torch.float64))
    assert [(s.side, s.path) for s in found] == [(side, f"1.layers.{n}") for side, n in places[:3]]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_sites_and_merits_come_out_without_grad_mode(context):
    model, x, y = fnn(), points(), torch.tensor([0, 1, 0, 1, 0, 1])
    with context():
        sites = find_sites(model, x)
        inside = measure(model, sites, [(x, y)], F.cross_entropy)
    assert [m.value for m in inside] == [m.value for m in measure(model, sites, [(x, y)], F.cross_entropy)]


def test_repeated_growth_offers_one_more_place_each_time():
    for make in (fnn, Named, Functional, Listed):
        model, x = make(), points()
        for grown in range(4):
            sites = find_sites(model, x)
            assert len(sites) == len({str(site) for site in sites}) == 2 + grown
            insert(model, sites[-1])


def test_the_users_hooks_stand_between_a_layer_and_its_place_as_they_will():
    model = module(lambda s, x: s.b(F.relu(s.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    model.b.register_forward_pre_hook(lambda m, args: (args[0] - 1,))  # after the place, so a ReLU layer fits
    x = points()
    (site,) = find_sites(model, x)
    assert str(site) == "Linear(4, 4) + ReLU before b"
    before = model(x)
    insert(model, site)
    assert torch.equal(model(x), before)


def test_slices_and_indices_of_a_sequential_still_mean_the_same():
    model = module(lambda s, x: s.body[3:](s.body[:3](x)) + s.body[4].bias, body=fnn())
    x = points()
    before = model(x)
    for site in find_sites(model, x):
        insert(model, site)
    assert torch.equal(model(x), before)


def test_torchs_encoder_layer_is_grown_around_but_not_inside():
    model = nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2))
    model = model.double().eval()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    assert "reads the weights" in dict(find_sites(model, x, form="relu").skipped)["1.linear2"]
    sites = find_sites(model, x)
    assert [site.path for site in sites] == ["1", "1"]
    for site in sites:
        name = insert(model, site).name
        torch.nn.init.normal_(model.get_submodule(name).second.weight)
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(fast, model(x))


def test_outputs_in_nests_and_dataclasses_are_seen():
    @dataclass
    class Output:
        logits: Tensor

    for wrap in (lambda y: Output(y), lambda y: {"a": [y]}, lambda y: (1, (y, None))):
        assert len(find_sites(module(lambda s, x, wrap=wrap: wrap(s.net(x)), net=fnn()), points())) == 2


def test_examples_are_tensors_tuples_and_dicts():
    model = module(lambda s, x, mask, *, scale=1.0: s.net(x * mask) * scale, net=fnn())
    x = points()
    as_tuple = find_sites(model, (x, torch.ones_like(x)))
    as_dict = find_sites(model, {"x": x, "mask": torch.ones_like(x), "scale": 2.0})
    assert as_tuple[:] == as_dict[:] and len(as_tuple) == 2
    integers = module(lambda s, t: s.net(s.embed(t)).mean(1), embed=nn.Embedding(5, 3), net=fnn())
    assert len(find_sites(integers, torch.randint(0, 5, (2, 4)))) == 2


@pytest.mark.parametrize("mode", [True, False])
def test_batch_norm_in_training_mode_with_a_batch_of_one(mode):
    model = cnn(norm=True).train(mode)
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    model[0][1].eval()  # a part in another mode than the whole
    x = images(1)
    with untouched(model), torch.no_grad():
        assert len(find_sites(model, x)) == 2
    assert not x.requires_grad


def test_a_call_that_raises_inside_the_model_and_is_caught_there_confuses_nothing():
    class Fragile(nn.Module):
        def forward(self, x):
            raise KeyError("not today")

    def forward(self, x):
        x = self.act(self.a(x))
        try:
            x = self.fragile(x)
        except KeyError:
            x = self.spare(x)
        return self.c(x)

    model = module(forward, a=nn.Linear(3, 4), act=nn.ReLU(), fragile=Fragile(), spare=nn.Tanh(), c=nn.Linear(4, 2))
    assert lines(model, points()) == ["Linear(4, 4) + ReLU after act", "Residual(Linear(4, 4), Tanh) after spare"]


def test_many_skip_connections_take_no_time():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    def forward(self, x):
        for _ in range(60):
            x = x + Own.apply(x)
        return self.head(self.act(x))

    model = module(forward, act=nn.Tanh(), head=nn.Linear(3, 2))
    assert (
        "it is unclear which dimension" in find_sites(model, points()[None]).explain()
    )  # 2 ** 60 paths, if walked one by one


def test_prelu_slopes_fit_the_place():
    flat = alive(nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)))
    tokens = alive(nn.Sequential(nn.Linear(3, 4), nn.PReLU(5), nn.Linear(4, 2)))
    for model, x in ((flat, points()), (tokens, torch.randn(2, 5, 3, dtype=torch.float64))):
        before = model(x)
        (site,) = find_sites(model, x)
        insert(model, site)
        assert torch.equal(model(x), before)


def test_a_site_prints_as_one_line_and_goes_to_json_pickle_and_deepcopy():
    for model, x in ((cnn(groups=2), images()), (Functional(torch.tanh), points()), (residual(), points())):
        for site in find_sites(model, x):
            assert "\n" not in str(site) and str(site).endswith(f"{site.side} {site.path}")
            for again in (
                Site.from_dict(json.loads(json.dumps(site.to_dict()))), pickle.loads(pickle.dumps(site)), copy.deepcopy(site)
            ):  # fmt: skip
                assert again == site and hash(again) == hash(site)
                assert again.find(model) == site.find(model)  # by its path


def test_sites_read_like_a_sequence_and_explain_themselves():
    sites = find_sites(fnn(), points())
    assert sites[0] in sites and list(sites)[-1] is sites[-1] and len(sites[:1]) == 1
    assert repr(sites) == "Sites(2 in Sequential, 0 places skipped)"
    assert repr(sites[0]) == "Site(Linear(4, 4) + ReLU after 1)"
    assert sites.explain() == (
        "Sequential: 2 sites, 0 places skipped\n"
        "  Linear(4, 4) + ReLU after 1   (+20 parameters, +32 FLOPs)\n"
        "  Linear(4, 4) + ReLU after 3   (+20 parameters, +32 FLOPs)"
    )
    assert str(find_sites(nn.Linear(3, 2).double(), points())) == "no sites"


def test_what_only_prepares_the_input_is_no_place():
    class Standardize(nn.Module):
        def forward(self, x):
            return (x - 0.5) / 2

    model = nn.Sequential(Standardize(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    sites = find_sites(model, torch.randn(2, 3))
    assert [str(site) for site in sites] == ["Linear(4, 4) + ReLU after 2"]
    assert dict(map(tuple, sites.skipped))["0"].startswith("comes before the first layer with weights")


def test_a_batch_with_labels_can_be_the_example():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = fnn()

        def forward(self, x):
            return self.layers(x)

    model, batch = Net(), {"x": points(), "labels": torch.zeros(len(points()))}
    assert list(find_sites(model, batch)) == list(find_sites(model, {"x": points()}))
    assert count_flops(model, batch) == count_flops(model, points())
    with pytest.raises(BadExample, match="unexpected keyword argument 'inputs'"):
        find_sites(model, {"inputs": points()})


@pytest.mark.parametrize("layer", ["auto", "residual", "parametric"])
@pytest.mark.parametrize("bend", [F.gelu, torch.tanh, F.relu])
@pytest.mark.parametrize("act", [nn.GELU, nn.Tanh, nn.ReLU])
def test_two_activations_before_a_flattening_are_one_place(act: Any, bend: Any, layer: str) -> None:
    """Only a ReLU after values that may be negative has a layer of its own behind it, which begins with a ReLU."""

    class Bent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.head = nn.Conv2d(1, 2, 3, padding=1), act(), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(bend(self.act(self.conv(x))).flatten(1))

    torch.manual_seed(0)
    sites = find_sites(Bent(), torch.randn(2, 1, 4, 4), form=layer)
    behind = layer == "auto" and bend is F.relu and act is not nn.ReLU
    assert [site.place for site in sites] == ["after act"] * (1 + behind)
    assert len({str(site) for site in sites}) == len(sites)
