"""What checks, growths and checkpoints of a Llama cost, as formulas; `python -m benchmarks.scale` prints the tables of the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SKETCH = 256  # rows and columns of what is summed instead of a large gradient
SAMPLE = 512  # columns of one unit by which units are chosen, about
CHECK, STEP = 1e6, 4e6  # tokens


@dataclass(frozen=True)
class Llama:
    """A decoder with gated feed-forward layers, and a twin at every boundary of its blocks; weights in single precision."""

    d: int  # width
    f: int  # hidden units of a feed-forward layer
    blocks: int
    words: int
    kv: int  # width of all keys, or of all values
    length: int  # tokens of a sample
    processes: int = 1

    @property
    def matrices(self) -> int:
        """Entries of the weights of one block."""
        return 2 * self.d * (self.d + self.kv) + 3 * self.d * self.f

    @property
    def block(self) -> int:
        """Parameters of one block, with both norms."""
        return self.matrices + 2 * self.d

    @property
    def parameters(self) -> int:
        return self.blocks * self.block + 2 * self.words * self.d + self.d

    @property
    def sites(self) -> int:
        return self.blocks + 1

    # --- FLOPs for one token ---

    @property
    def block_forward(self) -> int:
        """All products with weights, and both products of the attention."""
        return 2 * self.matrices + 4 * self.length * self.d

    @property
    def forward(self) -> int:
        return self.blocks * self.block_forward + 2 * self.words * self.d

    @property
    def step(self) -> int:
        """Forward and backward pass."""
        return 3 * self.forward

    @property
    def twin(self) -> int:
        """A twin runs once, and gradients come back to its two zeroed weights; through zeros nothing comes back."""
        return self.block_forward + 2 * self.d * self.f + 2 * self.d**2

    @property
    def twins(self) -> int:
        return self.sites * self.twin

    @property
    def check(self) -> int:
        """`measure` with the ratio: a pass of its own, and the twins."""
        return self.step + self.twins

    # --- bytes ---

    @property
    def weights(self) -> int:
        return 4 * self.parameters

    @property
    def whole_gradients(self) -> int:
        """The sums of the zeroed weights of all twins."""
        return 4 * self.sites * (self.d**2 + self.d * self.f)

    @property
    def sketches(self) -> int:
        """The same where sketches are summed, with the random signs that make them, a byte each."""
        return 4 * self.sites * 2 * SKETCH**2 + SKETCH * (2 * self.d + self.f)

    @property
    def candidates(self) -> int:
        """For a quarter more hidden units of every block: one and a half for each that would come."""
        return 3 * (self.f // 4) // 2

    @property
    def rows(self) -> int:
        """What makes the candidates, in both layers of every block, and how large each row is."""
        return 2 * self.blocks * self.candidates * (self.d + 4)

    @property
    def whole_columns(self) -> int:
        """The sums of the gradients of the columns that would read the candidates, and how alike these are."""
        return 4 * self.candidates * (self.blocks * self.d + self.candidates)

    @property
    def mixtures(self) -> int:
        """The same where mixtures are summed, with a sample of the columns and the random signs that make the mixtures."""
        return 4 * self.candidates * (SKETCH + SAMPLE + self.candidates) + SKETCH * self.blocks * self.d

    @property
    def new_block(self) -> int:
        return 4 * self.block

    @property
    def checkpoint(self) -> int:
        """Weights, and both averages of Adam."""
        return 3 * self.weights


LLAMAS = {
    "7B": Llama(4096, 11008, 32, 32_000, 4096, 4096, processes=64),
    "70B": Llama(8192, 28672, 80, 128_256, 1024, 4096, processes=512),
}

Row = tuple[str, str, Callable[[Llama], str]]

CHECKS: list[Row] = [
    ("forward pass, per token", "F = L (2 N + 4 s d) + 2 V d", lambda m: flops(m.forward)),
    ("training step, per token", "3 F", lambda m: flops(m.step)),
    ("twins at all L + 1 sites, per token", "W = (L + 1) (2 N + 4 s d + 2 d f + 2 d²)", lambda m: flops(m.twins)),
    ("`measure` on 1 M tokens / step of 4 M tokens", "(3 F + W) / (4 · 3 F)", lambda m: share(m.check * CHECK, m)),
    ("the same in watched steps: added", "W / (4 · 3 F)", lambda m: share(m.twins * CHECK, m)),
    ("weights", "4 P", lambda m: size(m.weights)),
    ("gradients of all twins, held whole", "4 (L + 1) (d² + d f)", lambda m: size(m.whole_gradients)),
    ("the same as sketches", "8 · 256² (L + 1) + 256 (2 d + f)", lambda m: size(m.sketches)),
    ("f / 4 more hidden units: rows of c = 3 f / 8 candidates", "2 L c (d + 4)", lambda m: size(m.rows)),
    ("gradients of their columns, held whole", "4 c (L d + c)", lambda m: size(m.whole_columns)),
    ("the same as mixtures", "4 c (256 + 512 + c) + 256 L d", lambda m: size(m.mixtures)),
]
GROWTHS: list[Row] = [
    ("FLOPs", "0", lambda m: "0"),
    ("the new block", "4 B", lambda m: size(m.new_block)),
    ("its Adam state", "8 B", lambda m: size(2 * m.new_block)),
    ("both, per process", "12 B / G", lambda m: size(3 * m.new_block / m.processes)),
]
CHECKPOINTS: list[Row] = [
    ("weights and Adam state", "12 P", lambda m: size(m.checkpoint)),
    ("per process, in shards", "12 P / G", lambda m: size(m.checkpoint / m.processes)),
]


def flops(count: float) -> str:
    return f"{count / 1e9:.0f} GFLOPs"


def share(count: float, model: Llama) -> str:
    """Of a training step."""
    return f"{count / (model.step * STEP):.2f}"


def size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def table(rows: list[Row]) -> str:
    lines = ["| | formula | 7B | 70B |", "|---|---|---|---|"]
    lines += [f"| {what} | {formula} | {' | '.join(map(value, LLAMAS.values()))} |" for what, formula, value in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    for rows in (CHECKS, GROWTHS, CHECKPOINTS):
        print(table(rows), end="\n\n")
