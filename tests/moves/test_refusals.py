"""What cannot grow is refused with a reason before anything changes; what a convolution is like stays."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from building import build, example_of
from sensli import find_sites, insert
from sensli.errors import BadExample, UnsupportedModel
from sensli.modules.running import tf32_note
from sensli.moves.stacking import find_stack_copies


def reasons(model: nn.Module, x: Tensor, **options: str) -> dict[str, str]:
    return dict(find_sites(model, x, **options).skipped)


def test_recurrent_layers_and_modules_used_twice() -> None:
    model, batch = build("recurrent")
    assert "is recurrent" in reasons(model, example_of(batch))["lstm"]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.fc(self.fc(x).relu()).relu())

    model = Twice()
    assert "times in one forward pass" in reasons(model, torch.randn(3, 4))["fc"]
    assert [site.path for site in find_sites(model, torch.randn(3, 4))] == ["head"]


def test_scripted_and_quantised_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(4, 4))
        quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
        mixed = reasons(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), quantised), torch.randn(3, 4)
        )  # torch warns: no gradient
    assert "quantised" in mixed["2.0"]
    assert "scripted" in reasons(nn.Sequential(scripted, nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4))["0"]


def test_the_meta_device() -> None:
    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModel, match="meta device"):
        find_sites(copy.deepcopy(model).to("meta"), x)
    site = find_sites(model, x)[0]
    model.to("meta")
    names = list(model.state_dict())
    with pytest.raises(UnsupportedModel, match="meta device"):
        insert(model, site)
    assert list(model.state_dict()) == names


def test_blocks_without_a_twin_say_why() -> None:
    model, batch = build("plain_blocks")
    assert all(
        "twin would learn nothing" in reason for reason in reasons(model, example_of(batch), form="twin").values()
    )
    model, batch = build("mlp")
    assert reasons(model, example_of(batch), form="twin") == {"": "no stack of blocks was reached by the example"}
    with pytest.raises(ValueError, match=r"init must be one of .*, got 'new'"):
        find_sites(model, example_of(batch), init="new")


@pytest.mark.parametrize("holder", ["ModuleDict", "ModuleList"])
def test_a_list_of_parts_has_no_block_to_copy(holder: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(self.block() for _ in range(3))
            self.head = nn.Linear(4, 2)

        def block(self) -> nn.Module:
            parts = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
            return nn.ModuleList(parts) if holder == "ModuleList" else nn.ModuleDict(zip("ab", parts, strict=True))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                norm, layers = block if holder == "ModuleList" else block.values()
                x = x + layers(norm(x))
            return self.head(x)

    found = find_sites(Parts(), torch.randn(3, 4))
    assert dict(found.skipped)["blocks"].startswith(
        f"holds 3 blocks that are each a {holder}, of which only the parts are called"
    )
    assert [site.path for site in found] == [f"blocks.{k}.{1 if holder == 'ModuleList' else 'b'}.1" for k in range(3)]
    assert "blocks" not in reasons(Parts(), torch.randn(3, 4), what="units")


def test_the_memory_layout_of_images_is_kept() -> None:
    model, (x, _) = build("cnn_channels_last")
    model.eval()
    for site in find_sites(model, x):
        insert(model, site)
    new = [p for name, p in model.named_parameters() if "grown" in name and p.ndim == 4]
    assert new and all(p.is_contiguous(memory_format=torch.channels_last) for p in new)
    assert model[:3](x).is_contiguous(memory_format=torch.channels_last)


def test_an_example_without_values() -> None:
    model, (x, _) = build("mlp")
    for example in (x.to("meta"), (x, x.to("meta"))):
        for search in (find_sites, find_stack_copies):
            with pytest.raises(
                BadExample, match=r"the example \(.*\) is on the meta device: it has shapes but no values"
            ):
                search(model, example)


def test_the_last_layer_with_weights_says_why_nothing_goes_beside_it() -> None:
    only = "is the only layer with weights, and it is the output: nothing can go after it"
    assert reasons(nn.Sequential(nn.Linear(2, 2)), torch.randn(2, 2)) == {"0": only}
    assert reasons(nn.Linear(2, 2), torch.randn(2, 2)) == {"": only}
    both = f"no more units: its output is what the model returns; no layer, because it {only}"
    assert reasons(nn.Sequential(nn.Linear(2, 2)), torch.randn(2, 2), what="both") == {"0": both}
    none = "no activation, no linear layer and no convolution was reached by the example"
    assert reasons(nn.Flatten(), torch.randn(2, 2)) == {"": none}
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    none = "no ReLU was reached by the example"
    assert reasons(two, torch.randn(2, 2), form="relu") == {"": none}

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0].mean(1))

    found = reasons(Recurrent(), torch.randn(2, 4, 3))
    assert set(found) == {"rnn", "head"} and found["head"].startswith(
        "is the last layer with weights: its output is the model's output, and before it there is no activation"
    )


def test_no_reason_is_given_for_a_place_of_a_search_that_goes_on() -> None:
    """Nothing goes between these blocks, so they are looked into, and there are places."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = {key: nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for key in "01"}
            self.blocks, self.head = nn.ModuleDict(blocks), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for key in "10":
                x = x + self.blocks[key](x)
            return self.head(x)

    found = find_sites(Crossed(), torch.randn(3, 2))
    assert len(found) and not found.skipped


def test_layers_inside_vmap() -> None:
    class Mapped(nn.Module):
        def __init__(self, way: Any) -> None:
            super().__init__()
            self.first, self.act, self.head, self.way = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), way

        def forward(self, x: Tensor) -> Any:
            return self.way(lambda row: self.head(self.act(self.first(row))))(x)

    x = torch.randn(5, 3)
    for grow in ("layers", "units"):
        with pytest.raises(
            UnsupportedModel, match=r"Mapped calls first inside torch\.vmap, where the values of a sample"
        ):
            find_sites(Mapped(torch.vmap), x, what=grow)
        with pytest.raises(UnsupportedModel, match=r"inside torch\.vmap"):
            find_sites(Mapped(lambda f: torch.vmap(torch.func.grad(lambda row: f(row).sum()))), x, what=grow)
        assert find_sites(Mapped(lambda f: f), x, what=grow)


def test_tf32_on_a_gpu_is_noted() -> None:
    gpu = torch.device("cuda", 1)
    note = tf32_note(gpu, convolutions=True, products=True)
    assert note is not None
    assert note.startswith("TF32 is on for convolutions and matrix products, so identities are not exact on cuda:1")
    assert "on for matrix products, so" in str(tf32_note(gpu, convolutions=False, products=True))
    assert tf32_note(gpu, convolutions=False, products=False) is None
    assert tf32_note(torch.device("cpu"), convolutions=True, products=True) is None
    assert tf32_note(None, convolutions=True, products=True) is None
