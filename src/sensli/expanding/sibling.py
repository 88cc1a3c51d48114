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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sensli.errors import ExpansionError, SensliError, UnsupportedModel
from sensli.expanding.weights import Stored, read_weights
from sensli.modules.siblings import Sibling, build_sibling
from sensli.moves.finding import find_sites
from sensli.moves.sites import Site
from sensli.surgery.growth import grow
from sensli.text.commands import import_optional


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
    transformers = import_optional("transformers", "sensli expand", extra="transformers")
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


@dataclass(frozen=True)
class BlockRule:
    """How a stack of blocks grows in files: what its tensors are called, which of a new one are zero, and which fields count it."""

    stack: str  # what the names of its tensors begin with, before the number: "model.layers."
    path: str  # the path of the list of blocks in the model
    zero: frozenset[str]  # the names, after the number, of the tensors that are zero in a new block
    # the names of all tensors of a new block, for every kind of block that can be added
    kinds: frozenset[frozenset[str]]
    # the fields of the configuration that hold the number of blocks; inside of others "text_config.num_hidden_layers"
    counts: tuple[str, ...]
    lists: tuple[str, ...]  # those that hold one entry per block

    def fits(self, names: set[str]) -> bool:
        """Whether a block with tensors of these names can be copied; numbers inside of them, as of experts, may be others."""
        return {generic_name(name) for name in names} in [{generic_name(name) for name in kind} for kind in self.kinds]

    def is_zero(self, name: str) -> bool:
        """Whether the tensor of this name is zero in a new block."""
        known = frozenset[str]().union(*self.kinds)
        if name in known:
            return name in self.zero
        alike = {
            other in self.zero for other in known if generic_name(other) == generic_name(name)
        }  # more experts than a sibling has
        if len(alike) != 1:
            raise ExpansionError(f"it is not known whether {name} must be zero in a new block.")
        return alike.pop()


def generic_name(name: str) -> str:
    """The name of a tensor in a block with ``*`` for every number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def make_sibling(described: Described) -> Sibling:
    """A small model of the folder's class that runs."""
    try:
        return build_sibling(described.model_class, described.config)
    except UnsupportedModel as error:
        raise ExpansionError(str(error)) from error


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


def _rule_of(model: Any, path: str, sites: list[Site]) -> BlockRule:
    zero: set[str] = set()
    kinds: set[frozenset[str]] = set()
    changed: dict[str, Any] = {}
    prefix = ""
    with tempfile.TemporaryDirectory() as folder:
        before = save_sibling(model, Path(folder) / "before")
        for number, site in enumerate(sites):
            grown = copy.deepcopy(model)
            growth = grow(grown, site.in_model(grown))
            after = save_sibling(grown, Path(folder) / f"after{number}")
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


def save_sibling(model: Any, folder: Path) -> dict[str, Stored]:
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
