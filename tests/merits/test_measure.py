"""`measure` equals the slow oracle, which really inserts every layer: every form, every kind, every norm, every mode."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oracle
from models import (
    Functional,
    Listed,
    Named,
    batches,
    cnn,
    deep,
    fnn,
    images,
    labels,
    loss_fn,
    points,
    residual,
    untouched,
)  # fmt: skip
from sensli import Merit, Merits, Probe, find_sites, insert, measure
from sensli.errors import MeasurementError
from sensli.merits.norms import NORMS

CASES = {
    "relu linear": (fnn, points, {}),
    "relu named": (Named, points, {}),
    "relu functional": (Functional, points, {}),
    "relu list and dict": (Listed, points, {}),
    "residual linear": (lambda: fnn(nn.Tanh), points, {}),
    "residual stack": (residual, points, {"form": "residual"}),
    "residual after prelu": (lambda: Named(lambda: nn.PReLU()), points, {"form": "residual"}),
    "parametric linear": (lambda: fnn(nn.GELU), points, {"form": "parametric"}),
    **{
        f"{layer} conv{dims}d groups={groups}": (
            lambda dims=dims, activation=activation, groups=groups: cnn(dims, activation, groups),
            lambda n=5, dims=dims: images(n, dims),
            {"form": layer},
        )
        for dims in (1, 2, 3)
        for layer, activation in (("relu", nn.ReLU), ("residual", nn.SiLU), ("parametric", nn.Tanh))
        for groups in ((1, 2) if dims == 2 else (1,))
    },
}


def reference_norm(gradient, norm, size=(), groups=1):
    """The five norms by their definitions: a full kernel, its transform on the map, one SVD per frequency."""
    if norm == "frobenius":
        return gradient.square().sum().item()
    if norm == "mean_square":
        return gradient.square().mean().item()
    if gradient.dim() > 2:
        out, per_group = gradient.shape[0] // groups, gradient.shape[1]
        full = gradient.new_zeros(gradient.shape[0], per_group * groups, *gradient.shape[2:])
        for g in range(groups):
            rows = slice(g * out, (g + 1) * out)
            full[rows, g * per_group : (g + 1) * per_group] = gradient[rows]
        wrapped = full.new_zeros(*full.shape[:2], *size)  # a kernel that is larger than the map wraps around
        for tap in torch.cartesian_prod(*(torch.arange(k) for k in full.shape[2:])).reshape(-1, len(size)).tolist():
            place = tuple(t % s for t, s in zip(tap, size, strict=True))
            wrapped[(..., *place)] += full[(..., *tap)]
        spectrum = torch.fft.fftn(wrapped, dim=tuple(range(2, 2 + len(size)))).flatten(2).permute(2, 0, 1)
    else:
        spectrum = gradient[None]
    if norm == "operator":
        return torch.linalg.svdvals(spectrum).max().item() ** 2
    rows = torch.linalg.vector_norm(spectrum, dim=2).amax(0)
    return rows.square().sum().item() if norm == "operator_l2" else rows.sum().item() ** 2


def sizes_of_maps(model, x):
    """The spatial size of every convolution's input, by the path of its weight."""
    found, handles = {}, []
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            handles.append(module.register_forward_pre_hook(
                lambda m, a, path=path: found.__setitem__(f"{path}.weight", (tuple(a[0].shape[2:]), m.groups))
            ))  # fmt: skip
    model(x)
    for handle in handles:
        handle.remove()
    return found


def expected(model, sites, data, norm, loss=loss_fn):
    """Merits and ratios: new weights from the extended network, existing ones from the plain model, by ordinary backward."""
    new, _ = oracle.gradients(model, sites, data, loss)
    merits = [
        reference_norm(g, norm, site.shape[1:] if site.kind == "conv" else (), site.move.groups)
        for g, site in zip(new, sites, strict=True)
    ]
    plain = copy.deepcopy(model)
    plain.zero_grad()
    total = sum(len(y) for _, y in data)
    for x, y in data:
        (loss(plain(x), y) * len(y) / total).backward()
    maps = sizes_of_maps(copy.deepcopy(model), data[0][0])
    weights = [(name, p.grad) for name, p in plain.named_parameters() if p.requires_grad and p.dim() >= 2]
    norms = [reference_norm(grad, norm, *maps.get(name, ((), 1))) for name, grad in weights]
    return merits, [merit / (sum(norms) / len(norms)) for merit in merits]


@pytest.mark.parametrize("case", CASES)
def test_merits_and_ratios_equal_the_extended_network(case):
    make, data, options = CASES[case]
    model, sizes = make(), (4, 4, 1)
    sites = find_sites(model, data(2), **options)
    assert len(sites) >= 2
    given = [(data(n), labels(n)) for n in sizes]
    for norm in NORMS:
        merits, ratios = expected(model, sites, given, norm)
        with untouched(model):
            found = measure(model, sites, given, loss_fn, norm=norm)
        assert [m.value for m in found] == pytest.approx(merits, rel=1e-12), norm
        assert [m.ratio for m in found] == pytest.approx(ratios, rel=1e-12), norm
        assert min(merits) > 0 and (found.batches, found.samples) == (3, 9)
    cheap = measure(model, sites, given, loss_fn, norm=norm, ratio=False)
    assert [m.value for m in cheap] == pytest.approx(merits, rel=1e-12) and cheap[0].ratio is None


class InPlace(nn.Module):
    """Activations, dropout and sums that write over their input."""

    def __init__(self):
        super().__init__()
        self.first, self.gelu, self.drop = nn.Linear(3, 4), nn.GELU(), nn.Dropout(0.3, inplace=True)
        self.second, self.silu, self.head = nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        x = self.drop(self.gelu(self.first(x)))
        return self.head(self.silu(self.second(x)).mul_(2).add_(1))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = fnn(), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()

    def forward(self, x, *, shift):
        return self.left(x) + self.right(shift)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(*fnn()[:4]), nn.Linear(4, 2).double()

    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False))


def shared_input():
    """One activation for two consumers: what comes back from both counts for a layer after it."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.a, self.b = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(4, 2)
            self.double()

        def forward(self, x):
            h = self.act(self.first(x))
            return self.a(h) * self.b(h)

    return Fork()


def frozen_front():
    model = deep()
    for layer in model[:5]:
        layer.requires_grad_(False)
    return model


def biases_only():
    model = fnn()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


ODD = {
    "in place": InPlace,
    "checkpointed": Checkpointed,
    "two consumers": shared_input,
    "frozen front": frozen_front,
    "biases only": biases_only,
    "all frozen": lambda: fnn().requires_grad_(False),
    "nested": lambda: nn.Sequential(nn.Sequential(fnn()[:2], nn.Sequential(*fnn()[2:4])), nn.Linear(4, 2)).double(),
}


@pytest.mark.parametrize("name", ODD)
def test_unusual_models_agree_with_the_oracle(name):
    model, data = ODD[name]().eval(), batches()
    sites = find_sites(model, points())
    new, _ = oracle.gradients(model, sites, data, loss_fn)
    merits = [g.square().sum().item() for g in new]
    with untouched(model):
        found = measure(model, sites, data, loss_fn)
        cheap = measure(model, sites, data, loss_fn, ratio=False)
    assert [m.value for m in found] == pytest.approx(merits, rel=1e-12) and max(merits) > 0
    assert [m.value for m in cheap] == pytest.approx(merits, rel=1e-12)
    trains = any(p.requires_grad and p.dim() >= 2 for p in model.parameters())
    assert all((m.ratio is not None) == trains for m in found)


def test_in_place_dropout_is_measured_in_training_mode_too():
    model = InPlace().train()
    sites = find_sites(model, points())
    assert [site.point.overwritten for site in sites] == [True, True]
    x, y = batches((6,))[0]
    with untouched(model):
        found = measure(model, sites, [(x, y)], loss_fn)
    new, _ = oracle.gradients(model, sites, [(x, y)], loss_fn)  # the same dropout: a new layer draws no random number
    assert [m.value for m in found] == pytest.approx([g.square().sum().item() for g in new], rel=1e-12)


@pytest.mark.parametrize("mode", [True, False])
def test_batch_norm_and_dropout_are_measured_in_the_mode_the_model_is_in(mode):
    model = nn.Sequential(cnn(norm=True)[0], nn.Dropout(0.4), nn.Flatten(), nn.Linear(4, 2)).double().train(mode)
    x, y = images(5), labels(5)
    for _ in range(3):
        model(images(5))  # statistics that differ from those of the batch
    model.zero_grad()
    sites = find_sites(model, x)
    with untouched(model):
        found = measure(model, sites, [(x, y)], loss_fn, norm="frobenius")
    new, _ = oracle.gradients(model, sites, [(x, y)], loss_fn)
    assert [m.value for m in found] == pytest.approx([g.square().sum().item() for g in new], rel=1e-12)


def test_any_subset_in_any_order_gives_the_same_numbers():
    model, data = deep(5), batches()
    sites = find_sites(model, points())
    every = {m.site: m.value for m in measure(model, sites, data, loss_fn)}
    for chosen in ([sites[3]], [sites[4], sites[0]], sites[::-1], [sites[1], sites[1]]):
        found = measure(model, chosen, data, loss_fn)
        assert [(m.site, m.value) for m in found] == [(site, every[site]) for site in chosen]


def test_sites_stay_valid_and_right_after_an_insertion_elsewhere():
    model, data = Named(), batches()
    sites = find_sites(model, points())
    before = [m.value for m in measure(model, sites, data, loss_fn)]
    insert(model, sites[0])
    after = measure(model, sites, data, loss_fn)
    assert after[1].value == pytest.approx(before[1], rel=1e-12)  # the identity in front changes nothing
    new, _ = oracle.gradients(model, sites, data, loss_fn)  # also at the place that has grown
    assert [m.value for m in after] == pytest.approx([g.square().sum().item() for g in new], rel=1e-12)


def test_batches_count_by_their_size():
    model, data = fnn(), batches((6, 6, 3, 1))
    sites = find_sites(model, points())
    one = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    parts, whole = measure(model, sites, data, loss_fn), measure(model, sites, one, loss_fn)
    assert [m.value for m in parts] == pytest.approx([m.value for m in whole], rel=1e-12)
    assert [m.ratio for m in parts] == pytest.approx([m.ratio for m in whole], rel=1e-12)
    unweighted = measure(model, sites, [(x, y) for x, y in data for _ in range(6 // len(y))], loss_fn)
    assert unweighted[0].value != pytest.approx(whole[0].value, rel=1e-6)  # the weights do matter here


def test_a_generator_serves_as_loader_and_max_batches_leaves_the_rest():
    model, data = fnn(), batches((5, 5, 5))
    sites = find_sites(model, points())
    stream = iter(data)
    assert measure(model, sites, stream, loss_fn, max_batches=2).batches == 2
    assert len(list(stream)) == 1
    assert [m.value for m in measure(model, sites, (b for b in data), loss_fn)] == [
        m.value for m in measure(model, sites, data, loss_fn)
    ]


def test_several_inputs_by_dict_and_a_loss_on_the_batch():
    model = TwoInputs()
    example = {"x": points(), "shift": points()[:, :2]}
    sites = find_sites(model, example)
    assert len(sites) == 3
    y = labels()
    by_dict = measure(model, sites, [example], lambda output, batch: loss_fn(output, y))
    by_pair = measure(model, sites, [(example, y)], loss_fn)
    assert [m.value for m in by_dict] == [m.value for m in by_pair] and by_pair.samples == 6


@pytest.mark.parametrize("sparse", [False, True])
def test_tokens_and_sparse_gradients(sparse):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4, sparse=sparse)
            self.fc, self.act, self.out = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5)
            self.double()

        def forward(self, tokens):
            return self.out(self.act(self.fc(self.embed(tokens)))).mean(1)

    model = Tokens()
    data = [(torch.randint(0, 5, (4, 3)), torch.randint(0, 5, (4,))) for _ in range(3)]
    sites = find_sites(model, data[0][0])
    new, _ = oracle.gradients(model, sites, data, loss_fn)
    found = measure(model, sites, data, loss_fn)
    assert [m.value for m in found] == pytest.approx([g.square().sum().item() for g in new], rel=1e-12)
    assert found[0].ratio > 0


def test_gradients_that_autograd_shares_or_expands_are_not_written_into():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = fnn()
            self.a, self.b = (nn.Parameter(torch.rand(2, 2, dtype=torch.float64)) for _ in range(2))

        def forward(self, x):
            return self.net(x) + self.a.sum() * x.sum(1, keepdim=True) * (self.a + self.b)[0]

    model, data = Sums(), batches()
    sites = find_sites(model, points())
    _, ratios = expected(model, sites, data, "frobenius")
    for confidence in (None, 0.999):
        found = measure(model, sites, data, loss_fn, confidence=confidence)
        assert [m.ratio for m in found] == pytest.approx(ratios, rel=1e-12)


def test_an_input_that_asks_for_a_gradient_hides_no_site():
    model = frozen_front()
    sites, (x, y) = find_sites(model, points()), batches((6,))[0]
    plain = measure(model, sites, [(x, y)], loss_fn)
    asking = measure(model, sites, [(x.requires_grad_(), y)], loss_fn)
    assert [m.value for m in asking] == [m.value for m in plain] and x.grad is None


def test_user_hooks_see_their_calls_and_stay():
    model = fnn()
    sites = find_sites(model, points())
    calls = []
    handle = model[1].register_forward_hook(lambda *_: calls.append(1))
    plain = [m.value for m in measure(model, sites, batches((6,)), loss_fn)]
    assert plain and len(calls) == 1
    handle.remove()


def test_before_one_of_two_consumers_only_what_that_one_sends_back_counts():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
            self.double()

        def forward(self, x):
            h = F.relu(self.first(x))
            return self.a(h) * self.b(h)

    model, data = Fork(), batches()
    (site,) = find_sites(model, points())
    assert (site.side, site.path) == ("before", "a")
    new, _ = oracle.gradients(model, [site], data, loss_fn)
    for ratio in (True, False):
        found = measure(model, [site], data, loss_fn, ratio=ratio)
        assert found[0].value == pytest.approx(new[0].square().sum().item(), rel=1e-12)


def test_a_hook_of_the_user_that_changes_the_output_is_part_of_the_model():
    model = fnn()
    model[1].register_forward_hook(lambda module, args, output: 2 * output)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    sites, data = find_sites(model, points()), batches()
    new, _ = oracle.gradients(model, sites, data, loss_fn)
    found = measure(model, sites, data, loss_fn)
    assert [m.value for m in found] == pytest.approx([g.square().sum().item() for g in new], rel=1e-12)


@pytest.mark.process  # compiles
def test_compiled_models_are_measured_and_grown():
    model = fnn()
    compiled = torch.compile(model, backend="eager")
    x, y = batches((6,))[0]
    before = compiled(x)
    sites = find_sites(compiled, x)
    values = [m.value for m in measure(compiled, sites, [(x, y)], loss_fn)]
    assert values == [m.value for m in measure(model, sites, [(x, y)], loss_fn)]
    growth = insert(compiled, sites[0], check=(x, y))
    assert torch.equal(compiled(x), before)
    with torch.no_grad():
        model.get_parameter(growth.parameters[0]).mul_(3)
    assert not torch.equal(compiled(x), before) and torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precision_agrees_within_its_means(dtype, tolerance):
    model, data = cnn(), batches((8, 8), images)
    sites = find_sites(model, images())
    exact = [m.value for m in measure(model, sites, data, loss_fn)]
    small = copy.deepcopy(model).to(dtype)
    sites = find_sites(small, images().to(dtype))
    found = measure(small, sites, [(x.to(dtype), y) for x, y in data], lambda o, t: F.cross_entropy(o.double(), t))
    assert [m.value for m in found] == pytest.approx(exact, rel=tolerance)


def test_channels_last_changes_nothing():
    model, data = cnn(), batches((4, 4), images)
    sites = find_sites(model, images())
    plain = [m.value for m in measure(model, sites, data, loss_fn)]
    model.to(memory_format=torch.channels_last)
    turned = [(x.to(memory_format=torch.channels_last), y) for x, y in data]
    assert [m.value for m in measure(model, sites, turned, loss_fn)] == pytest.approx(plain, rel=1e-12)


def test_auto_norm_is_operator_for_convolutions_alone():
    pictures, mixed = cnn(), nn.Sequential(cnn()[0], nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = images()
    assert measure(pictures, find_sites(pictures, x), [(x, labels(5))], loss_fn).norm == "operator"
    assert measure(mixed, find_sites(mixed, x), [(x, labels(5))], loss_fn).norm == "frobenius"


def test_auto_takes_no_norms_that_cost_more_than_the_passes() -> None:
    """Counted, not timed: one image does not pay for the operator norms of wide layers, a batch of them does."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(192, 5),
    )  # fmt: skip
    x, y = torch.randn(48, 3, 8, 8), torch.randint(0, 5, (48,))
    sites = find_sites(model, x[:1], where="conv")
    one, many = [(x[:1], y[:1])], [(x, y)]
    few = measure(model, sites, one, nn.functional.cross_entropy)
    asked = measure(model, sites, one, nn.functional.cross_entropy, norm="frobenius")
    assert few.norm == "frobenius" and [m.value for m in few] == [m.value for m in asked]
    assert measure(model, sites, one, nn.functional.cross_entropy, norm="operator").norm == "operator"
    assert measure(model, sites, many, nn.functional.cross_entropy).norm == "operator"
    # With confidence there are norms of many groups at every look.
    single = list(zip(x[:8].split(1), y[:8].split(1), strict=True))
    assert measure(model, sites, single, nn.functional.cross_entropy, confidence=0.9).norm == "frobenius"
    with Probe(model, sites) as probe:
        nn.functional.cross_entropy(model(x[:1]), y[:1]).backward()
    assert probe.merits().norm == "frobenius"


def test_the_table_shows_cost_and_dead_units():
    model = fnn()
    with torch.no_grad():
        model[0].bias[:] = torch.tensor([9.0, -9.0, 9.0, -9.0])  # two of four units never fire
        model[0].weight.mul_(0.1)
    merits = measure(model, find_sites(model, points()), batches(), loss_fn)
    assert merits[0].dead == 0.5
    text = str(merits)
    assert "Linear(4, 4) + ReLU after 1" in text and "50%" in text and "20" in text and "15 samples" in text
    assert text.index(str(merits.best.site)) < text.index(str(merits.worst.site))


def test_a_unit_that_only_the_last_sample_wakes_is_not_dead():
    model = fnn()
    with torch.no_grad():
        model[0].bias[:] = torch.tensor([9.0, -9.0, 9.0, 1.0])
        model[0].weight[:3] *= 0.1
        model[0].weight[3] = -1.0
    ((x, y),) = batches((12,))
    x.fill_(1.0)
    sites = find_sites(model, x)
    assert measure(model, sites, [(x, y)], loss_fn)[0].dead == 0.5
    x[-1] = -1.0
    assert measure(model, sites, [(x, y)], loss_fn)[0].dead == 0.25


def test_equal_merits_are_ranked_in_the_order_given():
    sites = find_sites(deep(5), points())
    merits = Merits(
        [Merit(s, v) for s, v in zip(sites, [1.0, 3.0, 3.0, 1.0, 2.0], strict=True)], norm="frobenius", batches=1
    )
    assert [m.site for m in merits.ranked] == [sites[i] for i in (1, 2, 4, 0, 3)]
    assert (merits.best.site, merits.worst.site) == (sites[1], sites[0])


def test_reentrant_checkpoints_are_refused_with_the_remedy():
    class Old(Checkpointed):
        def forward(self, x):
            x = self.body[1](self.body[0](x))
            return self.head(torch.utils.checkpoint.checkpoint(self.body[2:], x, use_reentrant=True))

    model = Old()
    sites = find_sites(model, points())
    assert [site.path for site in sites] == ["body.1"]
    data = batches()
    with untouched(model), pytest.raises(MeasurementError, match="use_reentrant=False, or use Probe"):
        measure(model, sites, data, loss_fn)


def test_a_loss_by_the_model_itself():
    class Output(dict):
        loss = None

    class SelfScored(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = fnn()

        def forward(self, x, labels=None):
            output = Output(logits=self.net(x))
            if labels is not None:
                output.loss = loss_fn(output["logits"], labels)
            return output

    model, data = SelfScored(), batches()
    sites = find_sites(model, {"x": points()})
    own = measure(model, sites, [{"x": x, "labels": y} for x, y in data])
    given = measure(model.net, find_sites(model.net, points()), data, loss_fn)
    assert [m.value for m in own] == pytest.approx([m.value for m in given], rel=1e-12)
    assert not math.isnan(own[0].ratio)
