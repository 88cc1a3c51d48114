"""How much memory a search and a measurement take beside the model, in units of its parameters.

What torch's allocator on the CPU hands out is counted, event by event, so that neither Python's memory nor freed pages that stay
with the process count, and a busy machine changes nothing.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.figure import Figure
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites

BLOCKS, WIDTH, HIDDEN, WORDS = 16, 512, 1376, 8000
BATCHES = 3  # of a measurement
MOST = 17  # batches of one with confidence: as many as there are groups, and one more


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What comes of some work, and the most bytes that it held beyond what was there before.

    What a thread without Python frees, as gloo's do, is not seen. It is taken as freed where something else lies in its place.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    starts: list[int] = []  # of what is held, in order
    held: dict[int, int] = {}
    now = most = 0
    for _, size, start in sorted(_changes(seen)):
        at = bisect_left(starts, start)
        if size < 0:
            now -= held.pop(start, 0)
            del starts[at : at + (at < len(starts) and starts[at] == start)]
            continue
        at -= at > 0 and starts[at - 1] + held[starts[at - 1]] > start
        while at < len(starts) and starts[at] < start + size:
            now -= held.pop(starts.pop(at))
        starts.insert(at, start)
        held[start] = size
        now += size
        most = max(most, now)
    return result, most


def _changes(seen: Any) -> Iterator[tuple[int, int, int]]:
    """When memory was taken or given back, how many bytes, and where."""
    events = list(seen.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr


def model_memory() -> list[Figure]:
    """Peaks of `find_sites` and `measure` on a Llama, against its parameters and against an ordinary backward pass."""
    names = ("find_sites", "measure", "measure with confidence")
    bars = (0.35, 0.25, 0.25)
    try:
        hf: Any = importlib.import_module("transformers")
    except ImportError:
        return [
            Figure(f"peak of {name}, Llama", None, bar, "needs transformers")
            for name, bar in zip(names, bars, strict=True)
        ]
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=8, num_key_value_heads=8, intermediate_size=HIDDEN,
        vocab_size=WORDS,
    )  # fmt: skip
    model: nn.Module = hf.LlamaForCausalLM(config)
    held = sum(parameter.nbytes for parameter in model.parameters())
    ids = torch.randint(0, WORDS, (2, 16))
    batch = {"input_ids": ids, "labels": ids}

    def backward() -> None:
        for _ in range(BATCHES):
            model(**batch).loss.backward()
        model.zero_grad()

    ordinary = peak(backward)[1]
    size = f"{held // 4_000_000} M parameters, {BLOCKS} blocks"
    figures = []
    for what in ("layers", "both"):
        sites, found = peak(lambda what=what: find_sites(model, {"input_ids": ids}, what=what))  # type: ignore[misc]
        wanted = [site for site in sites if site.kind == "block" or ".mlp." in site.path]
        kinds = "twins" if what == "layers" else "twins and feed-forward widths"
        figures.append(Figure(f"peak of find_sites, {kinds} / parameters", found / held, 0.35, f"Llama of {size}"))
        for name, more, count in (
            ("measure", {}, BATCHES),
            ("measure with confidence", {"confidence": 0.999999, "max_batches": MOST}, 2 * MOST),
        ):
            _, taken = peak(lambda s=wanted, m=more, c=count: measure(model, s, [batch] * c, **m))  # type: ignore[misc]
            how = f"{len(wanted)} places; {taken / held:.2f}, a backward pass {ordinary / held:.2f}"
            figures.append(
                Figure(f"peak of {name} - backward pass, {kinds} / parameters", (taken - ordinary) / held, 0.25, how)
            )
    return figures
