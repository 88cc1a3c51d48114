"""What a search for sites costs, with the trial of every place: in forward passes of the model, and as the model gets deeper."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figure import Figure
from benchmarks.networks import paper_cnn
from sensli.modules.flops import FlopCounter
from sensli.modules.running import run
from sensli.moves.finding import find_sites

ROUNDS = 5
SWIN = "Swin-Tiny"  # of two kinds of blocks in each of four lists


class _Block(nn.Module):
    """The residual block of a ResNet-18; with a stride it halves the map."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        stride = 1 if given == width else 2
        self.conv1, self.norm1 = nn.Conv2d(given, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.short = nn.Identity() if given == width else nn.Conv2d(given, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.short(x) + self.norm2(self.conv2(inner)))


def _resnet() -> nn.Module:
    stages = [nn.Sequential(_Block(a, b), _Block(b, b)) for a, b in ((64, 64), (64, 128), (128, 256), (256, 512))]
    stem = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def _transformer() -> nn.Module:
    blocks = [nn.TransformerEncoderLayer(192, 3, 768, batch_first=True, norm_first=True) for _ in range(12)]
    return nn.Sequential(nn.Linear(48, 192), *blocks, nn.Linear(192, 10))


def _hugging_face() -> list[tuple[str, Callable[[], nn.Module], dict[str, Tensor]]]:
    """Published small sizes, with smaller vocabularies; their lists of blocks follow a configuration. Empty without transformers."""
    try:
        hf: Any = importlib.import_module("transformers")
    except ImportError:
        return []
    vit = hf.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=112, num_labels=10
    )  # fmt: skip
    bert = hf.BertConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048, vocab_size=2000
    )  # fmt: skip
    convnext = hf.ConvNextConfig(hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2], num_labels=10)
    swin = hf.SwinConfig(embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], num_labels=10)
    llama = hf.LlamaConfig(
        hidden_size=288, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6, intermediate_size=768, vocab_size=2000
    )  # fmt: skip
    ids, photos = torch.randint(0, 2000, (4, 64)), torch.randn(4, 3, 224, 224)
    return [
        ("ViT-Tiny", lambda: hf.ViTForImageClassification(vit), {"pixel_values": torch.randn(4, 3, 112, 112)}),
        ("ConvNeXt-Atto", lambda: hf.ConvNextForImageClassification(convnext), {"pixel_values": photos}),
        (SWIN, lambda: hf.SwinForImageClassification(swin), {"pixel_values": photos}),
        ("BERT-Small", lambda: hf.BertForSequenceClassification(bert), {"input_ids": ids}),
        ("a Llama of 6 blocks", lambda: hf.LlamaForCausalLM(llama), {"input_ids": ids, "labels": ids}),
    ]


def _mlp(depth: int, width: int = 8) -> nn.Module:
    return nn.Sequential(
        *[part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 2)
    )


def _seconds(work: Callable[[], Any]) -> float:
    # The processor's time: a search is one thread's work, and others on the machine must not count.
    start = time.process_time()
    work()
    return time.process_time() - start


def search_cost() -> list[Figure]:
    """Searches in turn with forward passes in training mode, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [figure for name, make, example in _models() for figure in _in_passes(name, make(), example)]
        return [*figures, _growth_with_depth()]
    finally:
        torch.set_num_threads(threads)


def _models() -> list[tuple[str, Callable[[], nn.Module], Any]]:
    return [
        ("ResNet-18", _resnet, torch.randn(2, 3, 224, 224)),
        ("transformer of 12 blocks", _transformer, torch.randn(4, 196, 48)),
        ("the paper's CNN", paper_cnn, torch.randn(16, 3, 32, 32)),
        ("MLP of 12 layers", lambda: _mlp(12, 512), torch.randn(512, 512)),
        *_hugging_face(),
    ]


def _in_passes(name: str, model: nn.Module, example: Any) -> Iterator[Figure]:
    model.train()
    bar = 15 if name == SWIN else 10
    counted = _operations(lambda: find_sites(model, example)) / _operations(lambda: run(model, example))
    taken: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        taken.append((_seconds(lambda: run(model, example)), _seconds(lambda: find_sites(model, example))))
    passes = statistics.median(search for _, search in taken) / statistics.median(forward for forward, _ in taken)
    how = "trials included, training mode"
    yield Figure(f"find_sites of {name} / forward pass", passes, bar, f"{how}, one thread")
    yield Figure(f"find_sites of {name} / forward pass, in FLOPs", counted, bar, how)


def _operations(work: Callable[[], Any]) -> int:
    """FLOPs of products and convolutions, backward passes too."""
    with FlopCounter() as counter:
        work()
    return int(counter.total)


def _growth_with_depth() -> Figure:
    def seconds(depth: int) -> float:
        model, example = _mlp(depth), torch.randn(2, 8)
        return statistics.median(_seconds(lambda: find_sites(model, example)) for _ in range(3))

    seconds(50)
    shallow, deep = seconds(100), seconds(800)
    return Figure("find_sites of 800 layers / 8 x that of 100", deep / (8 * shallow), 1.5, "1 is linear")
