"""How much memory a look at a sharded model takes in each process, in blocks of the model.

Two processes hold a Llama that is sharded block by block. As in `memory`, what torch's allocator hands out is counted, event by event.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.figure import Figure
from benchmarks.memory import peak
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites

PROCESSES, BLOCKS, WIDTH, HIDDEN, WORDS = 2, 16, 1024, 2816, 4000
BATCHES = 2
MOST = 3.0  # blocks
TIMES = 2  # a look is counted, and the least taken: on a busy machine gloo's threads hold on to what they were given, and free it unseen


def sharded_memory() -> list[Figure]:
    """Peaks of `find_sites` and `measure` per process against those of a training step."""
    if importlib.util.find_spec("transformers") is None:
        return [Figure("peak of a look at a sharded Llama / blocks", None, MOST, "needs transformers")]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        processes = [context.Process(target=_look, args=(rank, folder)) for rank in range(PROCESSES)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    most: dict[str, float] = {name: max(each[name] for each in found) for name in found[0]}
    block, shard, step = most.pop("block"), most.pop("shard"), most.pop("training step")
    size = f"{most.pop('parameters') / 1e6:.0f} M parameters, {BLOCKS} blocks of {block / 2**20:.0f} MiB"
    beside = f"{PROCESSES} processes with {shard / block:.1f} blocks each; a training step {step / block:.1f}"
    return [
        Figure(f"peak of {name} - training step / blocks", (taken - step) / block, MOST, f"{taken / block:.1f}; {beside}; {size}")
        for name, taken in most.items()
    ]  # fmt: skip


def _look(rank: int, folder: Path) -> None:
    """What one process counts, in bytes, as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    model, counted = _make_llama()
    words = torch.randint(0, WORDS, (BATCHES, 2, 16), generator=torch.Generator().manual_seed(rank))
    batches = [{"input_ids": ids, "labels": ids} for ids in words]

    def train() -> None:
        for batch in batches:
            model(**batch).loss.backward()
        model.zero_grad()

    train()  # what FSDP2 makes when it first runs stays
    counted["training step"] = min(peak(train)[1] for _ in range(TIMES))
    example = {"input_ids": batches[0]["input_ids"]}
    for what, kinds in (("layers", "twins"), ("both", "twins and feed-forward widths")):
        sites, counted[f"find_sites, {kinds}"] = peak(lambda what=what: find_sites(model, example, what=what))  # type: ignore[misc]
        wanted = [site for site in sites if site.kind == "block" or ".mlp." in site.path]
        for ratio in (True, False):
            name = f"measure, {len(wanted)} {kinds}{'' if ratio else ', no ratio'}"
            look = partial(measure, model, wanted, batches, ratio=ratio)
            counted[name] = min(peak(look)[1] for _ in range(TIMES))
    (folder / f"{rank}.json").write_text(json.dumps(counted))
    dist.barrier()
    dist.destroy_process_group()


def _make_llama() -> tuple[Any, dict[str, float]]:
    """A sharded Llama, and its sizes in bytes."""
    from torch.distributed.fsdp import fully_shard

    hf: Any = importlib.import_module("transformers")
    config = hf.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=8, num_key_value_heads=8, intermediate_size=HIDDEN,
        vocab_size=WORDS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config)
    layers: Any = model.model.layers
    held = {
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "block": float(_bytes(layers[0])),
        "shard": float(_bytes(model) / PROCESSES),
    }
    for block in layers:
        fully_shard(block)
    return fully_shard(model), held


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
