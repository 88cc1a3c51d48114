"""Made-up images in the shape of CIFAR-10, a colour per class, and a small experiment on them: no test waits for data."""

from __future__ import annotations

import copy

import torch

from sensli_lab.paper.image_sets import Raw

TINY = {
    "name": "tiny",
    "title": "a small CNN",
    "shows": "that it works",
    "runs": 2,
    "settings": {
        "engine": "cnn",
        "data": {"name": "cifar10", "train": 96, "validation": 32, "test": 40},
        "network": {"kind": "cnn", "channels": [4, 4], "widths": [8]},
        "optimizer": {"name": "adam", "lr": 0.01},
        "schedule": {"patience": 0},
        "batch": 32,
        "epochs": 4,
        "insert_at": [1, 2, 3],
    },
    "arms": {"LI": {}, "whole": {"from_start": True}, "small": {"insert_at": []}},
    "figures": ["curves", "cost"],
}


def tiny(**settings: object) -> dict:
    data = copy.deepcopy(TINY)
    data["settings"].update(settings)
    return data


def raw(train: int = 150, test: int = 60) -> Raw:
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % 10
        noise = torch.randint(0, 60, (count, 32, 32, 3), generator=generator)
        return (noise + labels.view(-1, 1, 1, 1) * 15).to(torch.uint8), labels

    return Raw(*some(train), *some(test))
