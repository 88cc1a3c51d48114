"""A small sibling of a model: the same class from the same configuration, with few blocks, small widths and random weights.

What is found on a sibling holds for the class, and costs next to nothing at any size. Nothing here knows a model by its name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sensli.errors import UnsupportedModel
from sensli.modules import random_state
from sensli.modules.configs import is_configuration
from sensli.modules.running import let_memory_through, map_tensors, run, tensors
from sensli.modules.wrappers import class_of
from sensli.text.commands import import_optional

_SMALL = {  # fields that are widths or lengths, and how large they are in a sibling
    "vocab_size": 128, "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_source_positions": 32,
    "max_target_positions": 64, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_mel_bins": 16, "vocab_size_per_layer_input": 128, "first_k_dense_replace": 1,
}  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_SHARED_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_INNER = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip
_IDS = re.compile(r".*_token_id$|.*_token_index$")
_COUNTS = re.compile(r"(num_(hidden|decoder|encoder)?_?layers|n_layers?|(en|de)coder_layers|depth)")
_HEAD = 24  # the width of a head in a sibling on which heads are added too: four of them, or six, divide what they make
_TOKENS = 16  # of an example
_BLOCKS = 3  # a first, a last and one between, if all are of one kind


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and reports of transformers, which would be about siblings; random numbers stay as they were."""
    logging: Any = import_optional("transformers.utils.logging", "a small sibling", extra="transformers")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with random_state.kept(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _sections(config: Any) -> Iterator[Any]:
    """A configuration and those inside of it, such as those of text and of images."""
    yield config
    for name in getattr(type(config), "sub_configs", {}) or {}:
        inner = getattr(config, name, None)
        if inner is not None and not isinstance(inner, dict):
            yield from _sections(inner)


def shrink(config: Any, head: int | None) -> Any:
    """A copy of a configuration with few blocks and small widths; what is there per block is cut alike. ``head``: the width of a head."""
    small = copy.deepcopy(config)
    for section in _sections(small):
        counts = {
            name: value for name, value in vars(section).items() if type(value) is int and _COUNTS.fullmatch(name)
        }
        few = max(_BLOCKS, _period(section))
        for name, value in list(vars(section).items()):
            if name in counts:
                setattr(section, name, min(few, value))
            elif isinstance(value, (list, tuple)) and len(value) in counts.values():
                setattr(section, name, list(value)[:few])
        _shrink_section(section, head)
        section.dtype = torch.float32
    return small


def _shrink_section(section: Any, head: int | None) -> None:
    def get(name: str) -> int | None:
        value = getattr(section, name, None)
        return value if type(value) is int else None

    def put(name: str, value: Any) -> None:
        with suppress(AttributeError):  # some are computed from others
            setattr(section, name, value)

    for name, most in _SMALL.items():
        value = get(name)
        if value is not None and value > most:
            put(name, most)
    vocabulary = get("vocab_size")
    for name in [name for name in vars(section) if _IDS.match(name)]:
        value = getattr(section, name)
        if type(value) is int and vocabulary and value >= vocabulary:
            put(name, min(vocabulary - 1, value % vocabulary))
        elif isinstance(value, list):
            put(name, [each % (vocabulary or 2) for each in value])
    heads = next((value for name in _HEADS if (value := get(name))), None)
    hidden = next((value for name in _HIDDEN if (value := get(name))), None)
    if heads and hidden:
        few = heads if heads <= 4 else 4
        width = head or get("head_dim") or get("d_kv") or hidden // heads
        shared = next((value for name in _SHARED_HEADS if (value := get(name))), None)
        for name in _HEADS:
            if get(name):
                put(name, few)
        for name in _SHARED_HEADS:
            if get(name):
                put(name, few if shared == heads else min(shared or 1, max(1, few // 2)))
        for name in ("head_dim", "d_kv"):
            if get(name):
                put(name, width)
        for name in _HIDDEN:
            if get(name):
                put(name, few * width)
        if get("query_pre_attn_scalar"):
            put("query_pre_attn_scalar", width)
    for name in _INNER:
        if get(name):
            put(name, 96)
    chosen = next((name for name in ("num_experts_per_tok", "moe_k", "top_k") if get(name)), None)
    if chosen and get(chosen) > 2:  # type: ignore[operator]
        put(chosen, 2)
    size, patch = getattr(section, "image_size", None), getattr(section, "patch_size", None)
    if type(size) is int and type(patch) is int:
        put("image_size", 2 * patch)


def example_for(model: Any) -> dict[str, torch.Tensor]:
    """Something that a model of transformers can be called with: a few tokens, an image or a sound, and what a decoder is to begin with."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def tokens() -> torch.Tensor:
        return torch.randint(3, getattr(text, "vocab_size", 64), (2, 12), generator=generator, device="cpu")

    if name == "pixel_values":
        size = config.image_size
        return {name: torch.randn(2, getattr(config, "num_channels", 3), size, size, generator=generator, device="cpu")}
    if name == "input_features":
        length = 2 * getattr(config, "max_source_positions", 32)
        example = {name: torch.randn(2, config.num_mel_bins, length, generator=generator, device="cpu")}
    else:
        example = {name: tokens()}
    if getattr(config, "is_encoder_decoder", False):
        example["decoder_input_ids"] = tokens()
    return example


def _period(config: Any) -> int:
    """After how many blocks every kind of block has come: lists with one entry per block say it."""
    lists = [
        list(value) for value in vars(config).values() if isinstance(value, (list, tuple)) and len(value) > _BLOCKS
    ]
    named = [value for value in lists if all(isinstance(each, str) for each in value)]
    return max((value.index(kind) + 1 for value in named for kind in set(value)), default=0)


@dataclass(frozen=True)
class Sibling:
    """A small model of the same class, and an example for it."""

    model: Any
    example: Any


def build_sibling(model_class: Any, config: Any, example: Any = None, width: int = 16) -> Sibling:
    """The same class from the same configuration, with few blocks and small widths, that runs. ``width``: of a head.

    ``example``: one of the large model, which is cut to fit if that is possible. Without one, or where it cannot be, another is made.
    """
    problem = ""
    for head in (width, None):  # some list something per number of a head, and need the width that they have
        try:
            small = shrink(config, head)
            model = model_class(small).eval()
            _draw(model)
            return Sibling(model, _example_that_runs(model, small, example))
        except Exception as error:
            let_memory_through(error)
            problem = problem or f"{type(error).__name__}: {' '.join(str(error).split())}"
    raise UnsupportedModel(f"a small {model_class.__name__}, on which to try it, cannot be run: {problem}")


def _example_that_runs(model: nn.Module, config: Any, example: Any) -> Any:
    """The user's example, cut to the sizes of a sibling, or else one that is made for its class."""
    with torch.no_grad():
        if example is not None:
            cut = _cut(example, config)
            try:
                run(model, cut)
            except Exception as error:
                let_memory_through(error)
                if not hasattr(model, "main_input_name"):
                    raise
            else:
                return cut
        made = example_for(model)
        model(**made)
        return made


def _cut(example: Any, config: Any) -> Any:
    """An example with fewer and smaller token numbers; what is no number of a token stays as it is."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    whole = [each for each in tensors(example) if not each.is_floating_point() and each.dim() == 2]
    lengths = {each.shape[1] for each in whole}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to("cpu")
        if any(tensor.shape == each.shape for each in whole) and len(lengths) == 1:
            tensor = tensor[:2, :_TOKENS]
        if tensor.is_floating_point():
            return tensor.float()
        return tensor % vocabulary if vocabulary and tensor.dtype == torch.long else tensor

    return map_tensors(example, cut)


def is_configured(model: nn.Module) -> bool:
    """Whether a model says itself what its class builds it from."""
    return is_configuration(getattr(model, "config", None))


def sibling_of(model: nn.Module, example: Any) -> Sibling:
    """A small sibling of a model that has a configuration. Raises where its class builds none that runs."""
    if not is_configured(model):
        raise UnsupportedModel(
            f"{type(model).__name__} has no configuration (model.config) from which a small one could be built. Give a function that "
            "makes one: sibling=make_small."
        )
    kind = class_of(model)
    with quiet() if kind.__module__.startswith("transformers.") else nullcontext():
        return build_sibling(kind, model.config, example, _HEAD)


def _draw(model: nn.Module) -> None:
    """Random weights without a zero: what is zero in a new block is then zero because it has to be."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.copy_(0.1 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
