"""What an expansion changes in a model of this class, found on a small sibling: the same class, few blocks, small widths, random weights.

The sibling is grown by the library itself, whose trial proves that its function is kept. What differs between the folders that the
sibling leaves before and after is what has to differ in the real folder: which tensors are new, which of them are zero, and which fields of
the configuration count blocks. Nothing here knows a model by its name.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sensli.errors import ExpansionError, SensliError
from sensli.expanding.weights import Stored, read_weights
from sensli.modules import random_state
from sensli.moves.finding import find_sites
from sensli.moves.sites import Site
from sensli.surgery.growth import grow
from sensli.text.commands import imported

# ---- The folder's configuration, and the class that it names.

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
_HEAD = 16  # the width of a head in a sibling
_BLOCKS = 3  # a first, a last and one between, if all are of one kind


@dataclass(frozen=True)
class Described:
    """A model folder's configuration and its class."""

    folder: Path
    config: Any
    model_class: Any

    @cached_property
    def stored(self) -> dict[str, Any]:
        """The configuration as the folder has it."""
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found


def read_description(folder: Path, *, trust_remote_code: bool = False) -> Described:
    """Read what a model folder is, or raise with the reason why it is none that can be expanded."""
    transformers = imported("transformers", "sensli expand", extra="transformers")
    path = folder / "config.json"
    if not folder.is_dir():
        raise ExpansionError(f"{folder} is not a folder. Give one that save_pretrained wrote, with config.json in it.")
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise ExpansionError(
                f"{folder} has an adapter and no model. Merge it first: peft's model.merge_and_unload(), then save_pretrained."
            )
        raise ExpansionError(f"{folder} is not a model folder: it has no config.json.")
    try:
        stored = json.loads(path.read_text())
        if not isinstance(stored, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise ExpansionError(f"{path} cannot be read: {error}. Get it again.") from error
    if stored.get("quantization_config"):
        method = stored["quantization_config"].get("quant_method", "an unknown method")
        raise ExpansionError(
            f"{folder} is quantized ({method}), and a block of quantized weights cannot be zeroed exactly. Expand the model that it was "
            "made from, and quantize the result."
        )
    if stored.get("auto_map") and not trust_remote_code:
        raise ExpansionError(
            f"{folder} brings its own code ({', '.join(sorted(stored['auto_map'].values()))}), which would be run. Read it, and then say "
            "--trust-remote-code."
        )
    names = stored.get("architectures") or []
    if not names:
        raise ExpansionError(f"{path} does not say which class the model is of: it has no 'architectures'.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ExpansionError(f"transformers cannot read {path}: {' '.join(str(error).split())}") from error
    own = [value for value in (stored.get("auto_map") or {}).values() if value.endswith(f".{names[0]}")]
    if own:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        model_class: Any = get_class_from_dynamic_module(own[0], folder)
    else:
        model_class = getattr(transformers, names[0], None)
    if model_class is None:
        raise ExpansionError(
            f"{path} names the class {names[0]}, which this version of transformers ({transformers.__version__}) does not have."
        )
    return Described(folder, config, model_class)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and reports of transformers, which would be about siblings; random numbers stay as they were."""
    logging: Any = imported("transformers.utils.logging", "sensli expand", extra="transformers")
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


# ---- The sibling.


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


# ---- What a growth of the sibling changes in its folder.


@dataclass(frozen=True)
class BlockRule:
    """How a stack of blocks grows in files: what its tensors are called, which of a new one are zero, and which fields count it.

    Attributes:
        stack: What the names of its tensors begin with, before the number: ``"model.layers."``.
        path: The path of the list of blocks in the model.
        zero: The names, after the number, of the tensors that are zero in a new block.
        kinds: The names of all tensors of a new block, for every kind of block that can be added.
        counts: The fields of the configuration that hold the number of blocks, ``"text_config.num_hidden_layers"`` inside of others.
        lists: Those that hold one entry per block.
    """

    stack: str
    path: str
    zero: frozenset[str]
    kinds: frozenset[frozenset[str]]
    counts: tuple[str, ...]
    lists: tuple[str, ...]

    def fits(self, names: set[str]) -> bool:
        """Whether a block with tensors of these names can be copied; numbers inside of them, as of experts, may be others."""
        return {generic(name) for name in names} in [{generic(name) for name in kind} for kind in self.kinds]

    def is_zero(self, name: str) -> bool:
        """Whether the tensor of this name is zero in a new block."""
        known = frozenset[str]().union(*self.kinds)
        if name in known:
            return name in self.zero
        alike = {
            other in self.zero for other in known if generic(other) == generic(name)
        }  # more experts than a sibling has
        if len(alike) != 1:
            raise ExpansionError(f"it is not known whether {name} must be zero in a new block.")
        return alike.pop()


def generic(name: str) -> str:
    """The name of a tensor in a block with ``*`` for every number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True)
class Sibling:
    """A small model of the same class, and an example for it."""

    model: Any
    example: dict[str, torch.Tensor]


def build_sibling(described: Described) -> Sibling:
    """The same class from the same configuration, with few blocks and small widths, that runs."""
    problem = ""
    for head in (_HEAD, None):  # some list something per number of a head, and need the width that they have
        try:
            config = shrink(described.config, head)
            model = described.model_class(config).eval()
            _draw(model)
            example = example_for(model)
            with torch.no_grad():
                model(**example)
        except Exception as error:
            problem = problem or f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        return Sibling(model, example)
    raise ExpansionError(f"a small {described.model_class.__name__}, on which to try it, cannot be run: {problem}")


def find_rules(described: Described, sibling: Sibling) -> list[BlockRule]:
    """The rules for every stack of blocks that the sibling can grow, in the order of the data flow. Raises if there is none."""
    name = described.model_class.__name__
    try:
        sites = find_sites(sibling.model, sibling.example, form="twin")
    except SensliError as error:
        raise ExpansionError(f"no block can be added to a {name}: {error}") from error
    stacks: dict[str, list[Site]] = {}
    for site in sites:
        path, _, number = site.path.rpartition(".")
        if number.isdigit():  # a block of a list
            stacks.setdefault(path, []).append(site)
    rules = [_rule_of(sibling.model, path, inside) for path, inside in stacks.items()]
    if not rules:
        why = "; ".join(dict.fromkeys(reason for _, reason in sites.skipped))
        raise ExpansionError(f"no block can be added to a {name} without changing its function: {why}.")
    return rules


def _period(config: Any) -> int:
    """After how many blocks every kind of block has come: lists with one entry per block say it."""
    lists = [
        list(value) for value in vars(config).values() if isinstance(value, (list, tuple)) and len(value) > _BLOCKS
    ]
    named = [value for value in lists if all(isinstance(each, str) for each in value)]
    return max((value.index(kind) + 1 for value in named for kind in set(value)), default=0)


def _draw(model: nn.Module) -> None:
    """Random weights without a zero: what is zero in a new block is then zero because it has to be."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.copy_(0.1 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)


def _rule_of(model: Any, path: str, sites: list[Site]) -> BlockRule:
    zero: set[str] = set()
    kinds: set[frozenset[str]] = set()
    changed: dict[str, Any] = {}
    prefix = ""
    with tempfile.TemporaryDirectory() as folder:
        before = save(model, Path(folder) / "before")
        for number, site in enumerate(sites):
            grown = copy.deepcopy(model)
            growth = grow(grown, site.in_model(grown))
            after = save(grown, Path(folder) / f"after{number}")
            prefix = prefix or _prefix(before, after)
            start = f"{prefix}{growth.name.rpartition('.')[2]}."
            own = {name.removeprefix(start): each for name, each in after.items() if name.startswith(start)}
            there = _names_of_blocks(before, prefix)
            if frozenset(own) not in there:  # a norm after a block cannot be an identity, so the copy lacks it
                gone = sorted(min(there, key=lambda names: len(names ^ own.keys())) - own.keys())
                raise ExpansionError(
                    f"no block can be added to a {type(model).__name__} that from_pretrained would load: to keep the function, a new one "
                    f"would have to go without {', '.join(gone) or 'some of its tensors'}."
                )
            kinds.add(frozenset(own))
            zero |= {name for name, tensor in own.items() if tensor.is_zero()}
            changed |= dict(changed_fields(model.config.to_dict(), grown.config.to_dict()))
    counts = tuple(name for name, value in changed.items() if type(value) is int)
    lists = tuple(name for name, value in changed.items() if isinstance(value, (list, tuple)))
    return BlockRule(prefix, path, frozenset(zero), frozenset(kinds), counts, lists)


def _names_of_blocks(tensors: Mapping[str, Stored], prefix: str) -> set[frozenset[str]]:
    """The names of the tensors in each block of a stack, after its number."""
    blocks: dict[str, set[str]] = {}
    for name in tensors:
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            blocks.setdefault(number, set()).add(rest)
    return {frozenset(names) for names in blocks.values()}


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """The fields that differ, with their new values; those of a configuration inside of another by their path."""
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            yield from changed_fields(old, value, f"{inside}{name}.")
        elif old != value:
            yield f"{inside}{name}", value


def save(model: Any, folder: Path) -> dict[str, Stored]:
    """Write a small model; returns its tensors."""
    model.save_pretrained(folder)
    return read_weights(folder)


def _prefix(before: Mapping[str, Stored], after: Mapping[str, Stored]) -> str:
    """What the names of the new tensors begin with, before their number."""
    new = [name for name in after if name not in before]
    found = {match[1] for name in new if (match := re.match(r"(.*?\.)\d+\.", name))}
    if len(found) != 1:
        raise ExpansionError(f"the names of a new block's tensors have no single number: {', '.join(new[:3])}.")
    return found.pop()
