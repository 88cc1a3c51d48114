"""What the page "At scale" says: its formulas give what is measured on two small Llamas, and its numbers are what the formulas give."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.scale import CHECKPOINTS, CHECKS, GROWTHS, SKETCH, Llama, table
from sensli import Probe, Site, Sites, count_flops, find_sites, grow, measure, save_checkpoint
from sensli.merits import norms
from sensli.merits.catching import Catch
from sensli.merits.measuring import look_ahead
from sensli.modules.engines.distributed import Together
from sensli.modules.flops import FlopCounter
from sensli.modules.running import untouched

PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "at-scale.md"
SIZES = [Llama(64, 160, 3, 50, 32, 16), Llama(512, 1024, 2, 80, 256, 24)]
SAMPLES = 2


@cache
def found(size: Llama) -> tuple[nn.Module, dict[str, Tensor], Sites]:
    """A model of this size, a batch, and a twin at every boundary."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=size.d, intermediate_size=size.f, num_hidden_layers=size.blocks, vocab_size=size.words,
        num_attention_heads=4, num_key_value_heads=4 * size.kv // size.d, attn_implementation="eager",
    )  # fmt: skip
    model: nn.Module = hf.LlamaForCausalLM(config)
    ids = torch.randint(0, size.words, (SAMPLES, size.length))
    return model, {"input_ids": ids, "labels": ids}, find_sites(model, {"input_ids": ids}, where="block")


def operations(work: Any) -> float:
    """FLOPs for one sample of the batch. (The fused attention of CPUs does not say what its backward pass takes; the plain one does.)"""
    with FlopCounter() as counter:
        work()
    return counter.total / SAMPLES


@pytest.mark.library
@pytest.mark.parametrize("size", SIZES, ids=["small", "larger"])
def test_flops_are_those_of_the_formulas(size: Llama) -> None:
    model, batch, sites = found(size)
    assert len(sites) == size.sites and all(site.flops == size.block_forward * size.length for site in sites)
    assert count_flops(model, {"input_ids": batch["input_ids"]}) == pytest.approx(size.forward * size.length, rel=0.002)
    near = 0.002  # they leave out the table of positions
    assert operations(lambda: model(**batch).loss.backward()) == pytest.approx(size.step * size.length, rel=near)
    assert operations(lambda: measure(model, sites, [batch])) == pytest.approx(size.check * size.length, rel=near)
    model.zero_grad()

    def watched() -> None:
        with Probe(model, sites):
            model(**batch).loss.backward()

    added = operations(watched) - operations(lambda: model(**batch).loss.backward())
    model.zero_grad()
    assert added == pytest.approx(size.twins * size.length, rel=0.002)


@pytest.mark.library
@pytest.mark.parametrize("size", SIZES, ids=["small", "larger"])
def test_bytes_are_those_of_the_formulas(size: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, sites = found(size)
    assert sum(parameter.nbytes for parameter in model.parameters()) == size.weights
    assert held(model, sites, batch) == size.whole_gradients
    if size.d > SKETCH:
        monkeypatch.setattr(norms, "ROOM", 0)
        assert held(model, sites, batch) == size.sketches


@pytest.mark.library
def test_candidates_of_widths_take_what_the_formulas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    size = SIZES[1]
    model, batch, _ = found(size)
    [width] = [s for s in find_sites(model, {"input_ids": batch["input_ids"]}, what="units") if ".mlp." in s.path]
    assert held(model, [width], batch) == size.whole_columns
    monkeypatch.setattr(norms, "ROOM", 0)
    assert held(model, [width], batch) == size.mixtures
    catch = seen(model, [width], batch)
    values = catch.sites[0].site.move._entries  # type: ignore[attr-defined]
    assert sum(value.nbytes for value in (*values.values, *values.grains) if value is not None) == size.rows


def seen(model: nn.Module, sites: Sequence[Site], batch: Any) -> Catch:
    """Made for a measurement that a few samples have passed before."""
    catch = Catch(model, sites, weights=False, sketched=True)
    with untouched(model):
        look_ahead(Together(None, "look"), model, catch, batch, 1, None)
    return catch


def held(model: nn.Module, sites: Sequence[Site], batch: Any) -> int:
    """Bytes of what is summed at all sites, and of what makes sketches of it."""
    catch = seen(model, sites, batch)
    with catch.hooked():
        model(**batch).loss.backward()
        catch.forget_pass()
    model.zero_grad()
    sums = [total for each in catch.sites for total in each.totals().values()]
    signs = [] if catch.sketcher is None else list(catch.sketcher._signs.values())
    return sum(tensor.nbytes for tensor in (*sums, *signs))


@pytest.mark.library
@pytest.mark.parametrize("size", SIZES, ids=["small", "larger"])
def test_growths_and_checkpoints_take_what_the_formulas_say(size: Llama, tmp_path: Path) -> None:
    model, batch, _ = found(size)
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> int:
        """One step; the bytes of the optimizer's averages."""
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())

    before = train()
    save_checkpoint(tmp_path / "small.ckpt", model, optimizer=optimizer)
    assert (tmp_path / "small.ckpt").stat().st_size == pytest.approx(size.checkpoint, rel=0.05)
    site = find_sites(model, {"input_ids": batch["input_ids"]}, where="block")[0]
    assert operations(lambda: grow(model, site, optimizer=optimizer)) == 0
    assert sum(parameter.nbytes for parameter in model.parameters()) - size.weights == size.new_block
    assert train() - before == 2 * size.new_block


def test_the_page_prints_what_the_formulas_give() -> None:
    text = PAGE.read_text()
    assert all(table(rows) in text for rows in (CHECKS, GROWTHS, CHECKPOINTS))
