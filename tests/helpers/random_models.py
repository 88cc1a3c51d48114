"""Random small models: a recipe is a list of pieces with their options, prints as code, and builds the same model every time.

A failure is repeated from its text: ``from random_models import *; model, x, y = Recipe("mlp", piece("plain")).build()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

KINDS = ("mlp", "conv2d", "conv1d", "tokens")
DTYPES = ("float64", "float32", "bfloat16")
BODIES = ("attributes", "sequential", "list")
RETURNS = ("tensor", "tuple", "dict", "scalars")
HOOKS = (
    "no",
    "after",
    "before",
    "watching",
)  # of the user, on the first layer: what it gives, what it is given, nothing
LOSSES = ("plain", "target", "twice", "logged", "aside", "penalty")  # `invariants.loss_of` has them
SHAPES = {"mlp": (3,), "conv2d": (3, 5, 4), "conv1d": (3, 5), "tokens": (5, 3)}
CONVS = {"conv2d": nn.Conv2d, "conv1d": nn.Conv1d}
BATCH, CLASSES = 4, 3


def a_map(kind: str, into: int, out: int) -> nn.Module:
    """The layer with weights of a kind of model; it keeps everything but the number of features."""
    return CONVS[kind](into, out, 3, padding=1) if kind in CONVS else nn.Linear(into, out)


def a_norm(kind: str, name: str, width: int) -> nn.Module:
    if name == "batch" and kind != "tokens":
        return nn.BatchNorm2d(width) if kind == "conv2d" else nn.BatchNorm1d(width)
    if name in ("batch", "layer"):
        return nn.GroupNorm(2, width) if kind in CONVS else nn.LayerNorm(width)
    return nn.Identity()


# ---- activations, in all spellings ----------------------------------------------------------------------------------


class Squash(nn.Module):
    """An activation that torch does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.abs())


def by_method(x: Tensor) -> Tensor:
    return x.relu()


MODULES: dict[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "leaky": nn.LeakyReLU, "silu": nn.SiLU, "squash": Squash,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu, "leaky": F.leaky_relu, "silu": F.silu, "squash": F.softsign,
}  # fmt: skip
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "tanh": torch.tanh_, "leaky": F.leaky_relu_}
ACTS = tuple(MODULES)
SPELLINGS = ("module", "function", "in place", "function in place", "method")


def an_act(name: str, spelling: str = "module") -> Any:
    """A module or a function, whatever the spelling asks for (where it exists for the activation)."""
    if spelling == "in place" and name in ("relu", "leaky", "silu"):
        return MODULES[name](inplace=True)
    if spelling == "function in place" and name in IN_PLACE:
        return IN_PLACE[name]
    if spelling == "method" and name == "relu":
        return by_method
    return FUNCTIONS[name] if spelling == "function" else MODULES[name]()


# ---- pieces: each takes a value and returns one of the same shape ---------------------------------------------------


class Plain(nn.Module):
    """map, norm, activation, dropout."""

    def __init__(self, kind: str, width: int, act: str, spelling: str, norm: str, drop: str) -> None:
        super().__init__()
        self.map, self.norm, self.act = a_map(kind, width, width), a_norm(kind, norm, width), an_act(act, spelling)
        self.drop = {"no": nn.Identity(), "drop": nn.Dropout(0.5), "alpha": nn.AlphaDropout(0.5)}[drop]

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.norm(self.map(x))))


class Odd(nn.Module):
    """A Sequential whose forward does more than call it."""

    def __init__(self, kind: str, width: int, use: str, act: str) -> None:
        super().__init__()
        self.use = use
        self.net = nn.Sequential(a_map(kind, width, width), an_act(act), a_map(kind, width, width), an_act(act))

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "indexed":
            return self.net[3](self.net[2](self.net[1](self.net[0](x))))
        if self.use == "counted":
            return self.net(x) * len(self.net)
        if self.use == "sliced":
            return self.net[2:](torch.tanh(self.net[:2](x)))
        if self.use == "weight":
            return self.net(x) + 0.1 * self.net[2].weight.mean()
        if self.use == "last":
            return self.net(x) + 0.1 * self.net[-2].bias.mean()
        for layer in self.net:
            x = layer(x)
            if self.use == "class" and isinstance(layer, (nn.ReLU, nn.Tanh)):
                x = 0.5 * x
            if self.use == "name" and type(layer).__name__ in ("Linear", "Conv1d", "Conv2d"):
                x = 0.5 * x
        return x


class Branches(nn.Module):
    def __init__(self, kind: str, width: int, join: str, act: str, spelling: str) -> None:
        super().__init__()
        self.join = join
        self.left, self.right = a_map(kind, width, width), a_map(kind, width, width)
        self.act = an_act(act, spelling)
        self.out = a_map(kind, 2 * width if join == "cat" else width, width)
        self.dim = -1 if kind in ("mlp", "tokens") else 1

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        if self.join == "cat":
            return self.out(self.act(torch.cat([left, right], self.dim)))
        if self.join == "gate":
            return self.out(self.act(left) * torch.sigmoid(right))
        return self.out(self.act(left + right) + x)


class Overwritten(nn.Module):
    """An in-place activation on a value that is read elsewhere too."""

    def __init__(self, kind: str, width: int, read: str, spelling: str) -> None:
        super().__init__()
        self.read, self.act = read, an_act("relu", spelling)
        self.map, self.out = a_map(kind, width, width), a_map(kind, width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        skip = 2 * y if self.read == "before" else y
        self.act(y)
        if self.read == "input":  # what came in is overwritten after it was used
            y = self.act(self.out(y))
            return y + self.act(x * 1.0)
        return self.out(y) + skip


class Shared(nn.Module):
    def __init__(self, kind: str, width: int, what: str, act: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.second = a_map(kind, width, width), a_map(kind, width, width)
        self.act = an_act(act)
        if what == "two names":
            self.alias = self.act
        if what == "weight":
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "map":
            return self.second(self.act(self.first(torch.tanh(self.first(x)))))
        if self.what == "act":
            return self.act(self.second(self.act(self.first(x))))
        if self.what == "two names":
            return self.second(self.alias(self.first(x)))
        return self.second(self.act(self.first(x)))


class Special(nn.Module):
    """Weights that are computed, or that do not train."""

    def __init__(self, kind: str, width: int, weight: str, act: str, spelling: str) -> None:
        super().__init__()
        self.first, self.second = a_map(kind, width, width), a_map(kind, width, width)
        self.act = an_act(act, spelling)
        if weight == "frozen":
            self.first.requires_grad_(False)
        elif weight == "all frozen":
            self.requires_grad_(False)
        elif weight != "orthogonal" or kind not in CONVS:
            getattr(parametrizations, weight)(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class Frozen(nn.Module):
    """A frozen map, activations of which the last overwrites what it is given, and a map that trains."""

    def __init__(self, kind: str, width: int, act: str, spelling: str) -> None:
        super().__init__()
        self.first, self.second = a_map(kind, width, width).requires_grad_(False), a_map(kind, width, width)
        self.act, self.again = an_act(act), an_act("relu", spelling)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.again(self.act(self.first(x.detach()))))


class Noise(nn.Module):
    """Something that happens in training only."""

    def __init__(self, kind: str, width: int, how: str) -> None:
        super().__init__()
        self.how, self.map, self.act = how, a_map(kind, width, width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.map(x))
        if self.training:
            x = x - 0.5 if self.how == "shift" else x + 0.1 * torch.randn_like(x)
        return x


class Aux(nn.Module):
    """Returns something beside its value."""

    def __init__(self, kind: str, width: int, of: str, act: str) -> None:
        super().__init__()
        self.of, self.map, self.act, self.out = of, a_map(kind, width, width), an_act(act), a_map(kind, width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.act(self.map(x))
        if self.of == "weight":
            return self.out(y), self.map.weight.square().mean()
        return self.out(y), (y.square().mean() if self.of == "scalar" else y)


class Detached(nn.Module):
    def __init__(self, kind: str, width: int, part: str, act: str) -> None:
        super().__init__()
        self.part, self.act = part, an_act(act)
        self.map, self.out, self.side = (a_map(kind, width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.map(x))
        return self.out(y.detach()) + x if self.part == "all" else self.out(y) + self.side(y.detach())


class Inner(nn.Module):
    def __init__(self, kind: str, width: int, act: str) -> None:
        super().__init__()
        self.map, self.act = a_map(kind, width, width), an_act(act)

    def forward(self, x: Tensor, *, scale: float = 1.0, skip: Tensor | None = None) -> Tensor:
        y = self.act(self.map(x)) * scale
        return y if skip is None else y + skip


class Keywords(nn.Module):
    """Modules that are called with keyword arguments."""

    def __init__(self, kind: str, width: int, call: str, act: str) -> None:
        super().__init__()
        self.call, self.inner, self.out = call, Inner(kind, width, act), a_map(kind, width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.call == "all":
            return self.out(input=self.inner(x=x, scale=0.5))
        return self.out(self.inner(x, skip=x) if self.call == "skip" else self.inner(x, scale=0.5))


class Attention(nn.Module):
    def __init__(self, kind: str, width: int, act: str, skip: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.act, self.skip = act, skip

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        weights = torch.softmax(scores, -1) if self.act == "softmax" else F.relu(scores)
        return weights @ self.v(x) + (x if self.skip else 0)


class Heads(nn.Module):
    """Attention with several heads, however it is written."""

    def __init__(self, kind: str, width: int, written: str, dim: int) -> None:
        super().__init__()
        self.written, self.dim, self.heads, self.shared = written, dim, 4, 2 if "grouped" in written else 1
        inner, outer = self.heads * dim, self.heads // self.shared * dim
        if written == "torch":
            self.inner = nn.MultiheadAttention(width, 2, batch_first=True)
        elif "fused" in written:
            self.qkv = nn.Linear(width, inner + 2 * outer)
        else:
            self.q, self.k, self.v = (nn.Linear(width, size) for size in (inner, outer, outer))
        self.out = nn.Linear(width if written == "torch" else inner, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.written == "torch":
            return x + self.out(self.inner(x, x, x, need_weights=False)[0])
        if "fused" in self.written:
            both = self.heads // self.shared * self.dim
            maps = self.qkv(x).split([self.heads * self.dim, both, both], -1)
        else:
            maps = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.unflatten(-1, (-1, self.dim)).transpose(-3, -2) for each in maps)
        k, v = (each.repeat_interleave(self.shared, -3) for each in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class Wide(nn.Module):
    """A width between two layers, and what may happen to its units on the way."""

    def __init__(self, kind: str, width: int, way: str, act: str, norm: str) -> None:
        super().__init__()
        self.kind, self.way, wide = kind, way, width + 2
        self.up, self.norm = a_map(kind, width, 2 * wide if way == "gate" else wide), a_norm(kind, norm, wide)
        self.act = nn.PReLU(wide) if way == "prelu" and kind != "tokens" else an_act(act)
        if way == "depthwise" and kind in CONVS:
            self.deep = CONVS[kind](wide, wide, 3, padding=1, groups=wide)
        flat = way == "flatten" and kind in CONVS
        self.down = nn.Linear(2 * wide, width) if flat else a_map(kind, 2 * wide if way == "twice" else wide, width)

    def forward(self, x: Tensor) -> Tensor:
        y, dim = self.up(x), 1 if self.kind in CONVS else -1
        if self.way == "gate":
            y, gate = y.chunk(2, dim)
            y = y * gate.sigmoid()
        y = self.act(self.norm(y))
        if hasattr(self, "deep"):
            y = self.deep(y)
        if self.way == "twice":
            y = torch.cat([y, -y], dim)
        if isinstance(self.down, nn.Linear) and self.kind in CONVS:
            y = self.down(F.adaptive_avg_pool1d(y.flatten(2), 2).flatten(1))
            return x + y.reshape(*y.shape, *(1 for _ in x.shape[2:]))
        return x + self.down(y)


class Competing(nn.Module):
    """A width whose units depend on their number, or on the other units."""

    def __init__(self, kind: str, width: int, how: str, act: str, more: int) -> None:
        super().__init__()
        self.how, self.act, self.dim = how, an_act(act), 1 if kind in CONVS else -1
        self.up, self.down = a_map(kind, width, width + more), a_map(kind, width + more, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x)).movedim(self.dim, -1)
        return x + self.down(COMPETING[self.how](y).movedim(-1, self.dim))


def largest(x: Tensor) -> Tensor:
    """All but the two largest units are zero."""
    values, places = x.topk(2, -1)
    return torch.zeros_like(x).scatter(-1, places, values)


def numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1]).to(x)


COMPETING: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": largest,
    "argmax": lambda x: x * F.one_hot(x.argmax(-1), x.shape[-1]).to(x),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1).values,
    "shift": lambda x: F.pad(x, (1, 0))[..., :-1],
    "halves": lambda x: torch.cat([x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :].square()], -1),
    "positions": lambda x: x + 0.1 * numbers(x),
    "alternating": lambda x: torch.where(numbers(x) % 2 == 0, x, x.square()),
    "first apart": lambda x: torch.cat([x[..., :1].exp(), x[..., 1:]], -1),
    "first decides": lambda x: x + (x[..., :1].detach() > 0.1),
    "count": lambda x: x * ((x > 0.1).sum(-1, keepdim=True) > 2),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: F.normalize(x, dim=-1),
    "norm of numbers": lambda x: x / (1 + x.detach().nan_to_num().square().sum(-1, keepdim=True)),
    "roll": lambda x: x.roll(1, -1),
}


class Encoder(nn.Module):
    """torch's own encoder."""

    def __init__(self, kind: str, width: int, norm_first: bool, drop: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 6, drop, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Moved(nn.Module):
    """Values that are moved, cut or changed on their way from an activation to the next layer."""

    def __init__(self, kind: str, width: int, how: str, act: str, spelling: str) -> None:
        super().__init__()
        self.how, self.act = how, an_act(act, spelling)
        self.map, self.out = a_map(kind, width, width), a_map(kind, width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.map(x))
        order = torch.arange(x.shape[-1]).flip(0).expand_as(x)
        if self.how == "scatter":
            x = torch.full_like(x, -0.1).scatter(-1, order[..., 1:], x[..., 1:])
        elif self.how == "add":
            x = torch.full_like(x, -0.1).scatter_add(-1, order, x)
        elif self.how == "gather":
            x = x.gather(-1, order)
        elif self.how == "pad":
            x = F.pad(x[..., 1:], (1, 0), value=-0.5)
        elif self.how == "mask":
            x = x.masked_fill(x > 0.5, -0.2)
        elif self.how == "shift":
            x = x - 0.1
        else:
            x = x.unflatten(1, (1, -1)).flatten(1, 2).flip(-1)
        return self.out(x)


class Annealed(nn.Module):
    """A module with a number that somebody sets from outside."""

    def __init__(self, kind: str, width: int, act: str) -> None:
        super().__init__()
        self.inner, self.out = Inner(kind, width, act), a_map(kind, width, width)
        self.inner.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.inner.temperature = 0.5
        return self.out(self.inner(x) / self.inner.temperature)


class Remembering(nn.Module):
    """Keeps tensors of the last pass, with their graph."""

    def __init__(self, kind: str, width: int, where: str) -> None:
        super().__init__()
        self.where, self.map, self.act, self.memory = where, a_map(kind, width, width), nn.ReLU(), {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.map(x))
        if self.where == "dict":
            self.memory["last"] = x.mean()
        else:
            self.last = x.mean()
        return x


# ---- stacks of equal blocks -----------------------------------------------------------------------------------------


class Branch(nn.Module):
    """map, activation, map, with or without what makes it a block of its own."""

    def __init__(self, kind: str, width: int, block: str, act: str, drop: float) -> None:
        super().__init__()
        self.block = block
        self.norm = a_norm(kind, {"batch": "batch", "pre": "layer", "post": "layer"}.get(block, ""), width)
        self.up, self.act, self.down = a_map(kind, width, width), an_act(act), a_map(kind, width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.block == "plain":
            return self.act(self.up(x)) * scale
        if self.block == "post":
            return self.norm(x + self.drop(self.down(self.act(self.up(x)))) * scale)
        inner = self.drop(self.down(self.act(self.up(self.norm(x))))) * scale
        return inner if self.block == "branch" else x + inner


LOOPS = (
    "plain", "outer", "scaled", "numbered", "hidden", "first", "apart", "is last", "positions", "keyword", "checkpoint", "sliced",
    "reversed", "zip",
)  # fmt: skip


class Blocks(nn.Module):
    """A ModuleList of equal blocks, and the many loops people write over one."""

    def __init__(self, kind: str, width: int, loop: str, block: str, act: str, count: int, drop: float) -> None:
        super().__init__()
        self.loop = loop
        self.blocks = nn.ModuleList([Branch(kind, width, block, act, drop) for _ in range(count)])
        if loop == "positions":
            shape = (width, *(1 for _ in SHAPES[kind][1:])) if kind in CONVS else (width,)
            self.positions = nn.ParameterList([torch.randn(shape) for _ in range(count)])
        if loop == "zip":
            self.gates = nn.ModuleList([nn.Tanh() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        hidden, first = [x], x
        if self.loop == "apart":
            for block in self.blocks[:-1]:
                x = block(x)
            return torch.tanh(self.blocks[-1](x)) + x
        if self.loop == "sliced":
            for block in self.blocks[1:]:
                x = block(x)
            return self.blocks[0](x)
        if self.loop == "zip":
            for block, gate in zip(self.blocks, self.gates):  # noqa: B905 (as people write it)
                x = gate(block(x))
            return x
        for i, block in enumerate(reversed(self.blocks) if self.loop == "reversed" else self.blocks):
            if self.loop == "outer":
                x = x + block(x)
            elif self.loop == "scaled":
                x = x + 0.5 * block(x)
            elif self.loop == "numbered":
                x = x + block(x) / (i + 1)
            elif self.loop == "positions":
                x = block(x + self.positions[i])
            elif self.loop == "keyword":
                x = block(x=x, scale=0.5)
            elif self.loop == "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
            if self.loop == "is last" and i == len(self.blocks) - 1:
                x = 0.5 * x
            first = x if i == 0 else first
            hidden.append(x)
        if self.loop == "hidden":
            return x + hidden[-2]
        return x + first if self.loop == "first" else x


# ---- the recipe -----------------------------------------------------------------------------------------------------

# name: the class, and its options with all their values, the simplest first
PIECES: dict[str, tuple[Callable[..., nn.Module], dict[str, tuple[Any, ...]]]] = {
    "plain": (
        Plain,
        {"act": ACTS, "spelling": SPELLINGS, "norm": ("no", "batch", "layer"), "drop": ("no", "drop", "alpha")},
    ),
    "blocks": (
        Blocks,
        {
            "loop": LOOPS,
            "block": ("residual", "branch", "pre", "post", "batch", "plain"),
            "act": ACTS,
            "count": (2, 3, 1),
            "drop": (0.0, 0.5),
        },
    ),
    "odd": (
        Odd,
        {"use": ("indexed", "counted", "sliced", "weight", "last", "class", "name"), "act": ("relu", "tanh")},
    ),
    "branches": (Branches, {"join": ("add", "cat", "gate"), "act": ACTS, "spelling": SPELLINGS}),
    "overwritten": (
        Overwritten,
        {"read": ("after", "before", "input"), "spelling": ("in place", "function in place")},
    ),
    "shared": (Shared, {"what": ("map", "act", "two names", "weight"), "act": ACTS}),
    "special": (
        Special,
        {
            "weight": ("frozen", "all frozen", "weight_norm", "spectral_norm", "orthogonal"),
            "act": ACTS,
            "spelling": SPELLINGS,
        },
    ),
    "frozen": (Frozen, {"act": ACTS, "spelling": ("in place", "function in place", "module")}),
    "noise": (Noise, {"how": ("shift", "noise")}),
    "aux": (Aux, {"of": ("scalar", "value", "weight"), "act": ACTS}),
    "detached": (Detached, {"part": ("one", "all"), "act": ACTS}),
    "keywords": (Keywords, {"call": ("scale", "skip", "all"), "act": ACTS}),
    "moved": (
        Moved,
        {"how": ("flip", "gather", "scatter", "add", "pad", "mask", "shift"), "act": ACTS, "spelling": SPELLINGS},
    ),
    "annealed": (Annealed, {"act": ACTS}),
    "remembering": (Remembering, {"where": ("attribute", "dict")}),
    "attention": (Attention, {"act": ("relu", "softmax"), "skip": (True, False)}),
    "wide": (
        Wide,
        {
            "way": ("plain", "gate", "depthwise", "flatten", "twice", "prelu"),
            "act": ACTS,
            "norm": ("no", "batch", "layer"),
        },
    ),
    "competing": (Competing, {"how": tuple(COMPETING), "act": ACTS, "more": (2, 3, 6)}),
    "heads": (Heads, {"written": ("torch", "separate", "fused", "grouped", "fused grouped"), "dim": (2, 3)}),
    "encoder": (Encoder, {"norm_first": (False, True), "drop": (0.0, 0.5)}),
}
FOR_TOKENS = ("attention", "encoder", "heads")


@dataclass(frozen=True)
class Piece:
    name: str
    options: tuple[tuple[str, Any], ...]

    def build(self, kind: str, width: int) -> nn.Module:
        return PIECES[self.name][0](kind, width, **dict(self.options))

    def __repr__(self) -> str:
        """As code, without the options that have their first value."""
        values = PIECES[self.name][1]
        said = [f"{key}={value!r}" for key, value in self.options if value != values[key][0]]
        return f"piece({', '.join([repr(self.name), *said])})"


def piece(name: str, **options: Any) -> Piece:
    return Piece(name, tuple((key, options.get(key, values[0])) for key, values in PIECES[name][1].items()))


class Net(nn.Module):
    """A first layer, the pieces, a last layer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.kind, self.body, self.returns = recipe.kind, recipe.body, recipe.returns
        self.stem = a_map(recipe.kind, 3, recipe.width)
        pieces = [part.build(recipe.kind, recipe.width) for part in recipe.pieces]
        self.count = len(pieces)
        if recipe.body == "sequential":
            self.parts = nn.Sequential(*pieces)
        elif recipe.body == "list":
            self.parts = nn.ModuleList(pieces)
        else:
            for number, part in enumerate(pieces):
                setattr(self, f"part{number}", part)
        self.head = nn.Linear(recipe.width, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x, extras = self.stem(x), []
        if self.body == "sequential":
            x = self.parts(x)
        else:
            for part in self.parts if self.body == "list" else (getattr(self, f"part{i}") for i in range(self.count)):
                x = part(x)
                if isinstance(x, tuple):
                    x, extra = x
                    extras.append(extra)
        if self.kind in CONVS:
            x = x.flatten(2).mean(2)
        logits = self.head(x)
        logits = logits.mean(1) if self.kind == "tokens" else logits
        if self.returns == "tuple":
            return (logits, x, *extras)
        if self.returns == "dict":
            return {"logits": logits, "extras": extras, "hidden": x}
        if self.returns == "scalars":
            return logits, x.square().mean(), [extra.mean() for extra in extras]
        return logits


USUAL = {
    "width": 4, "body": "attributes", "returns": "tensor", "dtype": "float64", "train": False, "seed": 0, "hook": "no", "loss": "plain",
}  # fmt: skip


class Recipe:
    """What a model is made of. Its text is code that makes it again."""

    def __init__(
        self,
        kind: str,
        *pieces: Piece,
        width: int = 4,
        body: str = "attributes",
        returns: str = "tensor",
        dtype: str = "float64",
        train: bool = False,
        seed: int = 0,
        hook: str = "no",
        loss: str = "plain",
    ) -> None:
        self.kind, self.pieces, self.width, self.body, self.returns = kind, pieces, width, body, returns
        self.dtype, self.train, self.seed, self.hook, self.loss = dtype, train, seed, hook, loss

    def __repr__(self) -> str:
        said = [f"{key}={getattr(self, key)!r}" for key, value in USUAL.items() if getattr(self, key) != value]
        return f"Recipe({', '.join([repr(self.kind), *map(repr, self.pieces), *said])})"

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, an input and a target; the global random state stays."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            model = Net(self)
            with torch.no_grad():
                for name, parameter in model.named_parameters():  # nothing is an identity or dead by accident
                    if parameter.ndim < 2 and "parametrizations" not in name:
                        parameter.add_(0.1 + 0.3 * torch.rand_like(parameter))
                for name, buffer in model.named_buffers():
                    if name.endswith("running_mean"):
                        buffer.add_(0.3 * torch.randn_like(buffer))
                    if name.endswith("running_var"):
                        buffer.mul_(0.5 + torch.rand_like(buffer))
            x = torch.randn(BATCH, *SHAPES[self.kind])
            y = torch.randint(0, CLASSES, (BATCH,))
        if self.hook == "after":
            model.stem.register_forward_hook(lambda module, args, output: 1.5 * output)
        elif self.hook == "before":
            model.stem.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
        elif self.hook == "watching":
            model.stem.register_forward_hook(lambda module, args, output: None)
        dtype = getattr(torch, self.dtype)
        return model.to(dtype).train(self.train), x.to(dtype), y


@st.composite
def pieces(draw: Any, kind: str, body: str) -> Piece:
    names = [
        name
        for name in PIECES
        if (kind == "tokens" or name not in FOR_TOKENS) and not (name == "aux" and body == "sequential")
    ]
    name = draw(st.sampled_from(names))
    return piece(name, **{key: draw(st.sampled_from(values)) for key, values in PIECES[name][1].items()})


@st.composite
def recipes(draw: Any) -> Recipe:
    """Any recipe; the shortest and simplest first."""
    kind = draw(st.sampled_from(KINDS))
    body = draw(st.sampled_from(BODIES))
    return Recipe(
        kind,
        *draw(st.lists(pieces(kind, body), min_size=1, max_size=3)),
        body=body,
        returns=draw(st.sampled_from(RETURNS)),
        dtype=draw(st.sampled_from(("float64", *DTYPES))),
        train=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        hook=draw(st.sampled_from(("no", *HOOKS))),
        loss=draw(st.sampled_from(("plain", *LOSSES))),
    )
