"""The input pipeline: what whole-batch indexing gives is what cropping and flipping one image after another gives."""

from __future__ import annotations

import torch

from pictures import raw
from sensli_lab.paper import datasets
from sensli_lab.paper.datasets import PADDING
from sensli_lab.paper.image_sets import FACTS
from sensli_lab.paper.settings import DataSettings


def make(**wanted):
    settings = DataSettings("cifar10", **{"train": 90, "validation": 40, "test": 30, **wanted})
    return datasets.split_images(raw(), FACTS["cifar10"], settings, torch.device("cpu"), torch.float32)


def test_a_batch_is_cropped_and_flipped_like_its_images_one_by_one():
    images, index = make().train, torch.tensor([3, 50, 7, 7, 89, 0, 12])
    x, y = images.augmented(index, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    tops, lefts = torch.randint(0, 2 * PADDING + 1, (2, 7, 1), generator=generator).flatten(1).tolist()
    flips = torch.randint(0, 2, (7, 1), generator=generator).flatten().tolist()
    for row, place in enumerate(index.tolist()):
        padded = images.black.repeat(40, 40, 1)
        padded[4:36, 4:36] = images.x[place]
        crop = padded[tops[row] : tops[row] + 32, lefts[row] : lefts[row] + 32]
        crop = crop.flip(1) if flips[row] else crop
        assert torch.equal(x[row], crop.permute(2, 0, 1))
    assert torch.equal(y, images.y[index]) and 0 < sum(flips) < 7
    assert x.shape == (7, 3, 32, 32) and x.is_contiguous(memory_format=torch.channels_last)


def test_black_is_what_a_black_pixel_becomes():
    facts = FACTS["cifar10"]
    images = make().train
    mean, std = torch.tensor(facts.mean), torch.tensor(facts.std)
    torch.testing.assert_close(images.black, (torch.zeros(3) - mean) / std)
    back = (images.x * std + mean) * 255
    torch.testing.assert_close(back, back.round(), atol=1e-3, rtol=0)


def test_the_split_is_disjoint_and_hangs_on_its_seed_alone():
    one, again, other = make(), make(), make(split_seed=1)
    assert torch.equal(one.train.x, again.train.x) and not torch.equal(one.train.x, other.train.x)
    assert (len(one.train), len(one.validation), len(one.test)) == (90, 40, 30)
    rows = torch.cat((one.train.x, one.validation.x)).flatten(1)
    assert len(rows.unique(dim=0)) == 130
    assert len(make(test=0).test) == 60


def test_batches_can_be_gone_through_twice_and_know_their_number():
    images = make().test
    batches = images.batches(8, torch.arange(29, -1, -1))
    assert len(batches) == 4 and [len(y) for _, y in batches] == [len(y) for _, y in batches] == [8, 8, 8, 6]
    assert torch.equal(next(iter(batches))[1], images.y.flip(0)[:8])
