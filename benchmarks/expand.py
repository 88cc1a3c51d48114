"""`python -m benchmarks.expand`: a saved model of 2 GB expanded with ``--stream``, against copying the result: time and memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from sensli.expanding.weights import Content, Stored, read_weights, write_weights

GIGABYTES = 2.0
# The peak is that of the status file: what getrusage says includes the memory of the process that started it.
_CHILD = """
import json, re, sys, time
from pathlib import Path
import transformers
from transformers import LlamaForCausalLM
from sensli import expand
before = time.perf_counter()
expand(sys.argv[1], sys.argv[2], int(sys.argv[3]), stream=True)
seconds = time.perf_counter() - before
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"seconds": seconds, "peak": peak}))
"""


def random_model(folder: Path, gigabytes: float) -> None:
    """A Llama of this size in bfloat16, written shard by shard, never in memory as a whole."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2048
    config = LlamaConfig(
        hidden_size=width, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000, num_hidden_layers=2
    )  # fmt: skip
    folder.mkdir()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    per_block = sum(2 * _numbers(shape) for name, shape in shapes.items() if "layers.0." in name)
    outside = sum(2 * _numbers(shape) for name, shape in shapes.items() if ".layers." not in name)
    config.num_hidden_layers = max(2, round((gigabytes * 1e9 - outside) / per_block))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    noise = folder / "noise"
    noise.write_bytes((torch.randn(80 * 2**20) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    tensors: dict[str, Content] = {}
    for name, shape in shapes.items():
        if ".layers.1." not in name:
            for number in range(config.num_hidden_layers) if ".layers.0." in name else [0]:
                tensors[name.replace("layers.0.", f"layers.{number}.")] = Stored("BF16", shape, noise, 2 * number)
    for _ in write_weights(folder, tensors, 10**9):
        pass
    noise.unlink()


def _numbers(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def measure(gigabytes: float = GIGABYTES, blocks: int = 4, rounds: int = 3) -> dict[str, Any]:
    """Seconds of expanding and of ``cp -r`` of the result in turn, the median of their ratios, and the peak of memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_model(folder / "base", gigabytes)
        sizes = [each.size for each in read_weights(folder / "base").values()]
        expands, copies, peaks = [], [], []
        for _ in range(rounds):
            command = [sys.executable, "-c", _CHILD, str(folder / "base"), str(folder / "deeper"), str(blocks)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            expands.append(found["seconds"])
            peaks.append(found["peak"])
            before = time.perf_counter()
            subprocess.run(["cp", "-r", str(folder / "deeper"), str(folder / "copy")], check=True)
            copies.append(time.perf_counter() - before)
            shutil.rmtree(folder / "copy")
            shutil.rmtree(folder / "deeper")
        ratios = sorted(one / other for one, other in zip(expands, copies, strict=True))
    return {
        "gigabytes": round(sum(sizes) / 1e9, 2),
        "largest_tensor_mb": round(max(sizes) / 1e6),
        "expand_seconds": [round(each, 2) for each in expands],
        "cp_seconds": [round(each, 2) for each in copies],
        "ratio": round(ratios[len(ratios) // 2], 2),
        "peak_mb": round(max(peaks) / 1e6),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
