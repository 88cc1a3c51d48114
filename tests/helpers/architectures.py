"""Small models of every kind, with a batch each: what `find_sites` and `insert` must cope with.

Every entry is a function without arguments that returns the model and a batch: ``(input, target)`` with cross-entropy or mean squares by
the type of the target, or a dict of keyword arguments for a model that computes its own loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Entry = Callable[[], tuple[nn.Module, Any]]
HANDWRITTEN: dict[str, Entry] = {}
TRANSFORMERS: dict[str, Entry] = {}
GENERATORS: dict[str, Entry] = {}  # more kinds of language models, for what is peculiar to generating


def _entry(table: dict[str, Entry]) -> Callable[[Entry], Entry]:
    def add(function: Entry) -> Entry:
        table[function.__name__] = function
        return function

    return add


def _images(n: int = 3, channels: int = 3, size: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, channels, size, size), torch.randint(0, classes, (n,))


def _tokens(n: int = 2, length: int = 7, vocabulary: int = 29) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocabulary, (n, length)), torch.randint(0, vocabulary, (n, length))


# --- plain chains ---


@_entry(HANDWRITTEN)
def mlp() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 4))
    return net, (torch.randn(6, 5), torch.randint(0, 4, (6,)))


@_entry(HANDWRITTEN)
def tanh_mlp() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 4))
    return net, (torch.randn(6, 5), torch.randint(0, 4, (6,)))


@_entry(HANDWRITTEN)
def cnn_batchnorm() -> tuple[nn.Module, Any]:
    def unit(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    return nn.Sequential(*unit(3, 4), *unit(4, 6), nn.Flatten(), nn.Linear(24, 4)), _images()


@_entry(HANDWRITTEN)
def cnn_channels_last() -> tuple[nn.Module, Any]:
    model, (x, y) = cnn_batchnorm()
    return model.to(memory_format=torch.channels_last), (x.contiguous(memory_format=torch.channels_last), y)


@_entry(HANDWRITTEN)
def cnn_1d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(
        nn.Conv1d(2, 4, 5, padding=2), nn.ReLU(), nn.AvgPool1d(2), nn.Conv1d(4, 4, 4, groups=2), nn.LeakyReLU(),
        nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip
    return net, (torch.randn(3, 2, 16), torch.randint(0, 3, (3,)))


@_entry(HANDWRITTEN)
def cnn_3d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 3), nn.Flatten())
    return net, (torch.randn(2, 1, 4, 4, 4), torch.randn(2, 16))


@_entry(HANDWRITTEN)
def depthwise() -> tuple[nn.Module, Any]:
    def unit(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, a, 3, padding=1, groups=a), nn.BatchNorm2d(a), nn.ReLU6(), nn.Conv2d(a, b, 1), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    return nn.Sequential(*unit(3, 4), *unit(4, 6), *head), _images()


@_entry(HANDWRITTEN)
def weight_norm() -> tuple[nn.Module, Any]:
    wrap = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(wrap(nn.Linear(5, 6)), nn.ReLU(), wrap(nn.Linear(6, 6)), nn.SiLU(), nn.Linear(6, 4))
    return net, (torch.randn(6, 5), torch.randint(0, 4, (6,)))


@_entry(HANDWRITTEN)
def linear_chain() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)), (torch.randn(6, 5), torch.randint(0, 4, (6,)))


# --- hand-written forwards ---


@_entry(HANDWRITTEN)
def functional_cnn() -> tuple[nn.Module, Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3)
            self.fc1, self.fc2 = nn.Linear(20, 9), nn.Linear(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = torch.relu(self.conv2(x))
            x = F.dropout(x.reshape(len(x), -1), 0.1, self.training)
            return self.fc2(self.fc1(x).relu())

    return Net(), _images()


@_entry(HANDWRITTEN)
def branches() -> tuple[nn.Module, Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
            self.join, self.head = nn.Conv2d(8, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            both = torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], 1)
            return self.head(F.gelu(self.join(both)).mean((2, 3)))

    return Net(), _images()


@_entry(HANDWRITTEN)
def unet() -> tuple[nn.Module, Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
            self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
            self.out1, self.out2 = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = F.relu(self.down1(x))
            b = F.relu(self.down2(F.max_pool2d(a, 2)))
            return self.out2(F.relu(self.out1(torch.cat([a, self.up(b)], 1))))

    return Net(), (torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8))


@_entry(HANDWRITTEN)
def dense_connections() -> tuple[nn.Module, Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3)])
            self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
            self.head = nn.Linear(15, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = torch.cat([x, F.relu(norm(layer(x)))], 1)
            return self.head(x.mean((2, 3)))

    return Net(), _images()


@_entry(HANDWRITTEN)
def recurrent() -> tuple[nn.Module, Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(29, 6), nn.LSTM(6, 8, batch_first=True)
            self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 29)

        def forward(self, x: Tensor) -> Tensor:
            h, _ = self.lstm(self.embed(x))
            return self.head(F.relu(self.fc(h)))

    return Net(), _tokens()


@_entry(HANDWRITTEN)
def shared_activation() -> tuple[nn.Module, Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.act = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.act(self.b(self.act(self.a(x)))))

    return Net(), (torch.randn(6, 5), torch.randint(0, 4, (6,)))


# --- residual stacks ---


class BasicBlock(nn.Module):
    def __init__(self, width: int, stride: int = 1, into: int | None = None, last: nn.Module | None = None) -> None:
        super().__init__()
        into = into or width
        self.conv1, self.bn1 = nn.Conv2d(into, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = last or nn.ReLU(inplace=True)
        same = stride == 1 and into == width
        self.down = (
            None if same else nn.Sequential(nn.Conv2d(into, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        return self.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + skip)


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 2, 3, 1, 1, bias=False), nn.BatchNorm2d(2)
        self.conv3, self.bn3 = nn.Conv2d(2, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return self.relu(self.bn3(self.conv3(y)) + x)


@_entry(HANDWRITTEN)
def resnet_basic() -> tuple[nn.Module, Any]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.layer1 = nn.Sequential(BasicBlock(4), BasicBlock(4))
            self.layer2 = nn.Sequential(BasicBlock(6, 2, 4), BasicBlock(6))
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer2(self.layer1(F.relu(self.bn(self.stem(x)))))
            return self.fc(x.mean((2, 3)))

    return Net(), _images()


@_entry(HANDWRITTEN)
def resnet_bottleneck() -> tuple[nn.Module, Any]:
    body = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Sequential(Bottleneck(6), Bottleneck(6), Bottleneck(6))]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)), _images()


@_entry(HANDWRITTEN)
def resnet_leaky() -> tuple[nn.Module, Any]:
    blocks = [BasicBlock(4, last=nn.LeakyReLU(0.2)) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*blocks), nn.Flatten(), nn.Linear(144, 4)), _images()


@_entry(HANDWRITTEN)
def resnet_projected() -> tuple[nn.Module, Any]:
    """Every shortcut is a convolution and a norm."""

    class Block(BasicBlock):
        def __init__(self) -> None:
            super().__init__(4)
            self.down = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))

    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Block(), Block(), nn.Flatten(), nn.Linear(144, 4)), _images()


@_entry(HANDWRITTEN)
def resnet_preactivation() -> tuple[nn.Module, Any]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
            self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))

    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(144, 4)), _images()


@_entry(HANDWRITTEN)
def convnext_blocks() -> tuple[nn.Module, Any]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
            self.up, self.down, self.gamma = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(1e-6 * torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)

    return nn.Sequential(nn.Conv2d(3, 4, 2, 2), Block(), Block(), nn.Flatten(), nn.Linear(64, 4)), _images()


@_entry(HANDWRITTEN)
def mlp_mixer() -> tuple[nn.Module, Any]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
            self.tokens = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
            self.channels = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    return nn.Sequential(Block(), Block(), Block(), nn.Flatten(), nn.Linear(30, 4)), (
        torch.randn(3, 5, 6),
        torch.randint(0, 4, (3,)),
    )


@_entry(HANDWRITTEN)
def attributes_resnet() -> tuple[nn.Module, Any]:
    """Blocks that stand in no container."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first, self.second, self.head = (
                nn.Conv2d(3, 4, 3),
                BasicBlock(4),
                BasicBlock(4),
                nn.Linear(4, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(F.relu(self.stem(x)))).mean((2, 3)))

    return Net(), _images()


@_entry(HANDWRITTEN)
def plain_blocks() -> tuple[nn.Module, Any]:
    """Equal blocks without a skip connection."""
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *blocks, nn.Flatten(), nn.Linear(144, 4)), _images()


# --- transformers by hand ---


class Attention(nn.Module):
    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.layer_idx = nn.Linear(width, 3 * width), nn.Linear(width, width), number

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, width: int, number: int, post: bool = False, tupled: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, number)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.post, self.tupled, self.drop = post, tupled, nn.Dropout(0.1)

    def forward(self, hidden: Tensor, *, mask: Tensor | None = None) -> Any:
        if self.post:
            hidden = self.norm1(hidden + self.drop(self.attention(hidden, mask)))
            hidden = self.norm2(hidden + self.drop(self.down(F.gelu(self.up(hidden)))))
        else:
            hidden = hidden + self.drop(self.attention(self.norm1(hidden), mask))
            hidden = hidden + self.drop(self.down(F.gelu(self.up(self.norm2(hidden)))))
        return (hidden, None) if self.tupled else hidden


class GPT(nn.Module):
    def __init__(self, post: bool = False, tupled: bool = False, named: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.n_layers, self.named = nn.Embedding(29, 8), 3, named
        self.blocks = nn.ModuleList([GPTBlock(8, i, post, tupled) for i in range(self.n_layers)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 29, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            h = block(hidden=h, mask=mask) if self.named else block(h, mask=mask)
            h = h[0] if isinstance(h, tuple) else h
        return self.head(self.norm(h))


@_entry(HANDWRITTEN)
def gpt() -> tuple[nn.Module, Any]:
    return GPT(), _tokens()


@_entry(HANDWRITTEN)
def gpt_postnorm() -> tuple[nn.Module, Any]:
    return GPT(post=True), _tokens()


@_entry(HANDWRITTEN)
def gpt_tuples_keywords_tied() -> tuple[nn.Module, Any]:
    return GPT(tupled=True, named=True, tied=True), _tokens()


@_entry(HANDWRITTEN)
def sliced_list() -> tuple[nn.Module, Any]:
    """Runs the first n of its blocks: one that is only put into the list would push another out."""

    class Net(GPT):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for block in self.blocks[: self.n_layers]:
                h = block(h)
            return self.head(self.norm(h))

    return Net(), _tokens()


@_entry(HANDWRITTEN)
def parallel_lists() -> tuple[nn.Module, Any]:
    """Two lists that are walked together: neither can take a block alone."""

    class Net(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.ParameterList([torch.rand(8) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            for block, gate in zip(self.blocks, self.gates, strict=False):
                h = block(h * gate)
            return self.head(self.norm(h))

    return Net(), _tokens()


@_entry(HANDWRITTEN)
def encoder_prenorm() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(net, nn.Linear(8, 5)), (torch.randn(3, 6, 8), torch.randint(0, 5, (3, 6)))


@_entry(HANDWRITTEN)
def encoder_postnorm() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(net, nn.Linear(8, 5)), (torch.randn(3, 6, 8), torch.randint(0, 5, (3, 6)))


@_entry(HANDWRITTEN)
def torch_transformer() -> tuple[nn.Module, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it will not use a fast path
        net = nn.Transformer(8, 2, 2, 2, 16, batch_first=True, norm_first=True)
    return net, ((torch.randn(3, 6, 8), torch.randn(3, 4, 8)), torch.randn(3, 4, 8))


# --- transformers from the library of that name, small and with random weights ---


def _language(classname: str, configname: str, /, **config: Any) -> tuple[nn.Module, Any]:
    import transformers

    small = {
        "vocab_size": 29,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 16,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    built = getattr(transformers, configname)(**{**small, **tokens, **config})
    model = getattr(transformers, classname)(built)
    ids = torch.randint(3, 29, (2, 7))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _language_models() -> None:
    table: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
        "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 1}),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 1}),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_key_value_heads": 1, "head_dim": 4}),
        "mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 1}),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"num_key_value_heads": 1, "head_dim": 4}),
        "phi": ("PhiForCausalLM", "PhiConfig", {}),
        "opt": (
            "OPTForCausalLM",
            "OPTConfig",
            {"ffn_dim": 16, "word_embed_proj_dim": 8, "max_position_embeddings": 32},
        ),
        "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
        "bloom": ("BloomForCausalLM", "BloomConfig", {"n_head": 2}),
        "falcon": ("FalconForCausalLM", "FalconConfig", {}),
        "mixtral": (
            "MixtralForCausalLM",
            "MixtralConfig",
            {"num_key_value_heads": 1, "num_local_experts": 2, "experts_implementation": "eager"},
        ),
        "bert": ("BertForMaskedLM", "BertConfig", {}),
        "roberta": ("RobertaForMaskedLM", "RobertaConfig", {"max_position_embeddings": 32}),
        "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 4}),
    }
    one_head = {"num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_experts_per_tok": 1, "moe_intermediate_size": 8, "experts_implementation": "eager"}
    more: dict[str, tuple[str, str, dict[str, Any]]] = {
        # norms on the main path
        "bert_decoder": ("BertLMHeadModel", "BertConfig", {"is_decoder": True}),
        "opt_postnorm": (
            "OPTForCausalLM",
            "OPTConfig",
            {"ffn_dim": 16, "word_embed_proj_dim": 8, "max_position_embeddings": 32, "do_layer_norm_before": False},
        ),
        # kinds of blocks that the configuration lists
        "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**one_head, "sliding_window": 4, "layer_types": _mixed("sliding_attention")}),
        "gpt_neo": (
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            {"num_layers": 3, "num_heads": 2, "attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
        ),
        "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"num_key_value_heads": 1, "layer_types": _mixed("conv")}),
        "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"num_key_value_heads": 1}),
        # the number of a block decides what it is: no number of blocks in the configuration says it
        "qwen2_moe": (
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            {**experts, "num_key_value_heads": 1, "num_experts": 2, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2},
        ),
        "jamba": (
            "JambaForCausalLM",
            "JambaConfig",
            {
                "num_key_value_heads": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
                "mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False, "experts_implementation": "eager",
            },
        ),
        # the first block differs from the others
        "deepseek_v3": (
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            {
                **experts, "num_key_value_heads": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                "q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4,
            },
        ),
        "modernbert_decoder": ("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", {"local_attention": 4}),
        # states instead of keys and values
        "mamba2": (
            "Mamba2ForCausalLM",
            "Mamba2Config",
            {"state_size": 4, "num_heads": 4, "head_dim": 4, "n_groups": 1, "chunk_size": 4},
        ),
    }  # fmt: skip
    for into, entries in ((TRANSFORMERS, table), (GENERATORS, more)):
        for name, (model, config, options) in entries.items():
            into[name] = lambda m=model, c=config, o=options: _language(m, c, **o)


def _mixed(other: str) -> list[str]:
    return [other, "full_attention", other]


def _translator(classname: str, configname: str, /, **config: Any) -> tuple[nn.Module, Any]:
    import transformers

    small = {
        "vocab_size": 29, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
    }  # fmt: skip
    tokens = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": None,
    }
    model = getattr(transformers, classname)(getattr(transformers, configname)(**{**small, **tokens, **config}))
    ids, labels = torch.randint(3, 29, (2, 7)), torch.randint(3, 29, (2, 5))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


_language_models()


@_entry(TRANSFORMERS)
def bart() -> tuple[nn.Module, Any]:
    return _translator("BartForConditionalGeneration", "BartConfig")


@_entry(GENERATORS)
def marian() -> tuple[nn.Module, Any]:
    return _translator("MarianMTModel", "MarianConfig")


@_entry(GENERATORS)
def mbart() -> tuple[nn.Module, Any]:
    return _translator("MBartForConditionalGeneration", "MBartConfig", encoder_layers=3)


@_entry(GENERATORS)
def two_berts() -> tuple[nn.Module, Any]:
    """An encoder and a decoder, each with its own configuration inside the one of both."""
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    small = {
        "vocab_size": 29, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16,
        "max_position_embeddings": 32,
    }  # fmt: skip
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**small), BertConfig(**small))
    config.decoder_start_token_id, config.pad_token_id = 0, 2
    ids, labels = torch.randint(3, 29, (2, 7)), torch.randint(3, 29, (2, 5))
    return EncoderDecoderModel(config), {"input_ids": ids, "labels": labels}


@_entry(TRANSFORMERS)
def t5() -> tuple[nn.Module, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=29, d_model=8, d_kv=4, d_ff=16, num_layers=3, num_decoder_layers=2, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(3, 29, (2, 7)), torch.randint(3, 29, (2, 5))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}


@_entry(TRANSFORMERS)
def vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


@_entry(TRANSFORMERS)
def convnext() -> tuple[nn.Module, Any]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_stages=2, hidden_sizes=[4, 6], depths=[2, 3], patch_size=2, image_size=8)
    return ConvNextForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 8, 8),
        "labels": torch.tensor([0, 1]),
    }


@_entry(TRANSFORMERS)
def resnet() -> tuple[nn.Module, Any]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[2, 2], layer_type="basic")
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.tensor([0, 1]),
    }
