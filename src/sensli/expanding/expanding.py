"""`expand`: a saved model with more blocks, written as a new folder, all or nothing, with what is new and how to train it."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sensli.errors import ExpansionError
from sensli.expanding.checking import check_blocks, check_example, check_function, check_written, free_memory
from sensli.expanding.moments import check_optimizer, move_optimizer
from sensli.expanding.placing import BEFORE_ALL, Measurement, measurement_for, placing_lines
from sensli.expanding.record import RECORD, ExpansionRecord, expansion
from sensli.expanding.sibling import BlockRule, Described, find_rules, generic_name, make_sibling, read_description
from sensli.expanding.units import Lengthening, UnitPlan, find_unit_rules, plan_units
from sensli.expanding.weights import (
    Content,
    Drawn,
    Longer,
    Stored,
    Zeros,
    parse_size,
    read_weights,
    seed_of,
    write_weights,
)
from sensli.modules import checks
from sensli.modules.siblings import Sibling, quiet
from sensli.text.commands import BLOCK_STARTS, PLACES, TRAINER_FILE
from sensli.text.records import dumps as strict_json

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx|distcp)$|.*\.index\.json$")
# folders that are not part of a model
_TRAINING = re.compile(r"(checkpoint-\d+|global_step\d+|runs|logs|wandb|__pycache__)$|\.")
_CARD = ("<!-- sensli expand -->", "<!-- end of sensli expand -->")  # around what is added to a model card
Progress = Callable[[int, int], None]  # bytes written, of how many


def choose_places(place: str | Sequence[int], blocks: int | None, count: int) -> list[int]:
    """After which of so many blocks the new ones go, in ascending order; several may follow the same one."""
    if not isinstance(place, str):
        places = sorted(checks.whole("place", each, 3, least=0, error=ExpansionError) for each in place)
        outside = [each for each in places if each >= count]
        if outside:
            raise ExpansionError(
                f"place must name blocks from 0 to {count - 1}, after which new ones go, got {outside[0]}: the model has {count} blocks."
            )
        if blocks is not None and blocks != len(places):
            raise ExpansionError(
                f"blocks must be {len(places)}, the number of places given, or left out, got {blocks}."
            )
        if not places:
            raise ExpansionError("place must name at least one block, got none.")
        return places
    checks.one_of("place", place, PLACES)
    if blocks is None:
        raise ExpansionError(
            "blocks must say how many blocks to add (for example 8), or units how many units. Got neither."
        )
    blocks = checks.whole("blocks", blocks, 8, error=ExpansionError)
    if place == "even":  # at the end of each of so many parts of the stack
        return [
            (number + 1) * count // blocks - 1 if blocks <= count else number * count // blocks
            for number in range(blocks)
        ]
    if blocks > count:
        raise ExpansionError(
            f"blocks must be at most {count} with place={place!r}, which takes one new block for one that is there, got {blocks}. "
            "Use place='even', or name the places."
        )
    first = {"bottom": 0, "middle": (count - blocks) // 2, "top": count - blocks}[place]
    return list(range(first, first + blocks))


@dataclass(frozen=True)
class StackPlan:
    """Which blocks a stack will have."""

    rule: BlockRule  # how the stack grows in files
    stack: str  # what the names of its tensors begin with in this folder
    count: int  # how many blocks it has
    places: tuple[int, ...]  # after which of them the new ones go
    # of which blocks the new ones are copies: those that they follow, but for blocks that there can be only one of
    sources: tuple[int, ...]

    @cached_property
    def order(self) -> list[tuple[int, bool]]:
        """For each block of the result, which one it comes from and whether it is new."""
        new: dict[int, list[int]] = {}
        for place, source in zip(self.places, self.sources, strict=True):
            new.setdefault(place, []).append(source)
        return [
            each
            for number in range(BEFORE_ALL, self.count)
            for each in ((number, False), *((source, True) for source in new.get(number, ())))
            if each[0] != BEFORE_ALL
        ]

    @property
    def new_blocks(self) -> list[int]:
        """The numbers of the new blocks in the result."""
        return [number for number, (_, new) in enumerate(self.order) if new]

    def split(self, name: str) -> tuple[int, str] | None:
        """The number of the block that a tensor belongs to, and its name there; None if it is outside of the stack."""
        match = re.match(rf"{re.escape(self.stack)}(\d+)\.(.+)", name)
        return (int(match[1]), match[2]) if match else None

    def arrange(self, tensors: Mapping[str, Content], start: str, seed: int = 0) -> dict[str, Content]:
        """Every tensor of the result under its name, in the order of the files; a new one follows that of which it is a copy."""
        result: dict[str, Content] = {}
        for name, tensor in tensors.items():
            inside = self.split(name)
            if inside is None:
                result[name] = tensor
                continue
            for number, (source, new) in enumerate(self.order):
                if source == inside[0]:
                    own = f"{self.stack}{number}.{inside[1]}"
                    result[own] = self._begin(own, inside[1], tensor, start, seed) if new else tensor
        return result

    def _begin(self, name: str, rest: str, tensor: Content, start: str, seed: int) -> Content:
        """What a tensor of a new block begins with."""
        if start == "copy":
            return tensor
        if self.rule.is_zero(rest):
            return Zeros(tensor.dtype, tensor.shape)
        if start == "fresh" and len(tensor.shape) > 1:  # norms and biases stay copies
            return Drawn(tensor.dtype, tensor.shape, source_of(tensor), seed_of(name, seed))
        return tensor

    def old_name(self, name: str) -> str | None:
        """What a tensor of the result was called before; None if it is new."""
        inside = self.split(name)
        if inside is None:
            return name
        source, new = self.order[inside[0]]
        return None if new else f"{self.stack}{source}.{inside[1]}"

    def fields(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the configuration that change, by their path. ``full`` has those that the folder leaves to their defaults, too."""
        counts: dict[str, Any] = {name: get_field(full, name) + len(self.places) for name in self.rule.counts}
        lists = {name: list(get_field(full, name)) for name in self.rule.lists}
        return counts | {name: [each[source] for source, _ in self.order] for name, each in lists.items()}


def source_of(tensor: Content) -> Stored:
    """The tensor in a file that a content is made of."""
    found = tensor if isinstance(tensor, Stored) else getattr(tensor, "source")  # noqa: B009
    assert isinstance(found, Stored)
    return found


def get_field(data: Mapping[str, Any], path: str) -> Any:
    """A field of a configuration, or None."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None  # type: ignore[assignment]
    return data


def plan_blocks(
    described: Described,
    tensors: Mapping[str, Stored],
    rules: list[BlockRule],
    place: str | Sequence[int] | Measurement,
    blocks: int | None,
    stack: str | None = None,
) -> StackPlan:
    """Bind what was found on a sibling to the tensors of the folder, and choose the places."""
    if stack is not None and stack not in [rule.path for rule in rules]:
        raise ExpansionError(
            f"stack must be one of {', '.join(rule.path for rule in rules)}, the lists of blocks that can grow, got {stack!r}."
        )
    rule = next(rule for rule in rules if stack in (None, rule.path))
    start = prefix_in(tensors, rule.stack)
    if start is None:
        raise ExpansionError(
            f"the tensors of {described.folder} are called differently than those of a {described.model_class.__name__}: none begins with "
            f"{rule.stack!r}. Load the model with from_pretrained and save_pretrained it again."
        )
    parts: dict[int, set[str]] = {}
    known = {generic_name(name) for kind in rule.kinds for name in kind}
    ignored = [re.compile(each) for each in described.model_class._keys_to_ignore_on_load_unexpected or ()]
    for name in tensors:
        match = re.match(rf"{re.escape(start)}(\d+)\.(.+)", name)
        if match:
            own = parts.setdefault(int(match[1]), set())
            # Buffers of older versions, which nobody reads, are copied along.
            if generic_name(match[2]) in known or not any(each.search(name) for each in ignored):
                own.add(match[2])
    count, full = len(parts), described.config.to_dict()
    if parts.keys() != set(range(count)) or any(get_field(full, name) != count for name in rule.counts):
        said = ", ".join(f"{name}={get_field(full, name)}" for name in rule.counts)
        raise ExpansionError(
            f"{described.folder} has tensors of {count} blocks ({start}0 to {start}{max(parts)}), but its configuration says {said}. A "
            "shard may be missing. Get the folder again."
        )
    copied = [number for number in range(count) if rule.fits(parts[number])]
    if not copied:
        other = sorted({generic_name(name) for name in parts[0]} ^ known)[0]
        raise ExpansionError(
            f"the blocks of {described.folder} are not those of a {described.model_class.__name__}: they differ by the tensor {other}. "
            "Load the model with from_pretrained and save_pretrained it again."
        )
    if isinstance(place, Measurement):
        places = place.choose(described, rule.path, copied)
    else:
        places = choose_places(place, blocks, count)
    sources = [min(copied, key=lambda number: (number < after, abs(number - after))) for after in places]
    return StackPlan(rule, start, count, tuple(places), tuple(sources))


@dataclass(frozen=True)
class ExpansionPlan:
    """All that an expansion changes: more blocks in one stack, more units in all blocks, or both."""

    stack: StackPlan | None  # the blocks of a stack; None if no block is added
    units: UnitPlan | None  # the longer tensors; None if no unit is added
    fields: dict[str, Any]  # the fields of the configuration that change, by their path
    other_stacks: list[str]  # the paths of lists of blocks that could grow too

    def arrange(self, tensors: Mapping[str, Stored], start: str, seed: int) -> dict[str, Content]:
        """Every tensor of the result under its name."""
        found: Mapping[str, Content] = tensors if self.units is None else self.units.apply(tensors, seed)
        return dict(found) if self.stack is None else self.stack.arrange(found, start, seed)

    def old_name(self, name: str) -> str | None:
        """What a tensor of the result was called before; None if it is new."""
        return name if self.stack is None else self.stack.old_name(name)

    def lengthening(self, name: str) -> Lengthening | None:
        """How a tensor of the result has become longer; None if it has not, or is new."""
        old = self.old_name(name)
        return None if self.units is None or old is None else self.units.longer.get(old)

    @property
    def units_added(self) -> list[int]:
        """How many units each width got."""
        return [] if self.units is None else sorted({each.more for each in self.units.longer.values()})


def plan_expansion(
    described: Described,
    tensors: Mapping[str, Stored],
    sibling: Sibling,
    place: str | Sequence[int] | Measurement,
    blocks: int | None,
    stack: str | None,
    units: int | float | None,
) -> ExpansionPlan:
    """Find on a sibling what the expansion changes, and bind it to the folder."""
    more, deeper, rules = None, None, list[BlockRule]()
    fields: dict[str, Any] = {}
    if units is not None:
        more = plan_units(described, tensors, find_unit_rules(described, sibling), units)
        fields |= more.fields
    if units is None or blocks is not None or not isinstance(place, str):
        rules = find_rules(described, sibling)
        deeper = plan_blocks(described, tensors, rules, place, blocks, stack)
        fields |= deeper.fields(described.config.to_dict())
    others = [rule.path for rule in rules if deeper is not None and rule is not deeper.rule]
    return ExpansionPlan(deeper, more, fields, others)


def set_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration with other values of some fields; None takes a field out."""
    found: dict[str, Any] = json.loads(json.dumps(config))
    for path, value in fields.items():
        *inside, last = path.split(".")
        data = found
        for name in inside:
            data = data.setdefault(name, {})
        if value is None:
            data.pop(last, None)
        else:
            data[last] = value
    return found


def prefix_in(tensors: Mapping[str, Content], prefix: str) -> str | None:
    """What the names of a stack begin with in a folder: a model and its base are saved with and without the name of the base."""
    for start in (prefix, prefix.partition(".")[2]):
        if start and any(name.startswith(f"{start}0.") for name in tensors):
            return start
    return None


@contextmanager
def writing_to(out: Path, needed: int) -> Iterator[Path]:
    """A folder beside the target that becomes it in the end; whatever goes wrong, nothing is left of it."""
    parent = check_target(out)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ExpansionError(
            f"there is no room for {needed / 1e9:.1f} GB in {parent}, which has {free / 1e9:.1f} GB left. Nothing was written."
        )
    part = parent / f".{out.name}.{secrets.token_hex(4)}"  # hidden until it is whole, on the same disk
    try:
        part.mkdir()
        yield part
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def check_target(out: Path) -> Path:
    """The folder that the target will lie in. Raises if it cannot be written."""
    if out.exists() or out.is_symlink():
        raise ExpansionError(f"out must be a folder that does not exist yet, got {out}, which does.")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise ExpansionError(f"out must lie in a folder that exists, got {out}: there is no {parent}.")
    return parent


def files_beside(source: Path) -> list[Path]:
    """Everything of a model folder but weights and configuration: tokenizer, chat template, generation, processor, code."""
    others = ("config.json", "README.md", RECORD, TRAINER_FILE)  # a history of growths counts the blocks of before
    paths = (path for path in sorted(source.iterdir()) if path.name not in others)
    return [path for path in paths if not (_TRAINING if path.is_dir() else _WEIGHTS).match(path.name)]


def copy_beside(source: Path, target: Path) -> None:
    """Copy them."""
    for path in files_beside(source):
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        else:
            shutil.copy2(path, target / path.name)


def write_model(
    source: Path, target: Path, tensors: Mapping[str, Content], config: Mapping[str, Any], most: int,
    progress: Progress | None, hashes: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Write weights and a configuration, and copy what lies beside them in the source; ``hashes`` as in `write_weights`."""
    total, done = sum(tensor.size for tensor in tensors.values()), 0
    for size in write_weights(target, tensors, most, hashes):
        done += size
        if progress is not None:
            progress(done, total)
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    copy_beside(source, target)


def expand(
    model: str | Path,
    out: str | Path,
    blocks: int | None = None,
    *,
    place: str | Sequence[int] = "even",
    text: str | Path | None = None,
    batch: str | Path | None = None,
    stack: str | None = None,
    units: int | float | None = None,
    start: str = "zero",
    seed: int = 0,
    shard_size: str = "5GB",
    check: str | Path | None = None,
    stream: bool = False,
    optimizer: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ExpansionRecord:
    """Write a saved model with more blocks into a new folder.

    The weights are copied as bytes, file by file; no more than one piece of a tensor is in memory. What a new block must look like is
    found on a small sibling of the model. The result loads with ``from_pretrained`` everywhere, and computes the same to the bit.

    Args:
        model: A folder that ``save_pretrained`` wrote.
        out: The folder to write, which must not exist.
        blocks: How many blocks to add.
        place: Where: ``"even"``, ``"middle"``, ``"top"``, ``"bottom"``, the numbers of the blocks that are to be followed by a new one, or
            measured on data: ``"merit"`` takes the places that would gain most, ``"least"`` copies the blocks whose weights matter least
            (default: "even").
        text: For a measured place: a text file.
        batch: For a measured place: a file of saved batches instead, dicts of keyword arguments or pairs of input and target.
        stack: The list of blocks to expand, such as ``"model.decoder.layers"``, where a model has several. None takes the first.
        units: How many hidden units the feed-forward parts of all blocks get: a number, or a share of those that they have (0.25). With
            units and without ``blocks`` no block is added.
        start: What new blocks begin as. ``"zero"``: copies of their neighbors whose last maps are zero, so that each is an identity.
            ``"fresh"``: the same with new weights of the neighbor's spread. ``"copy"``: copies, which change the output (default: "zero").
        seed: Of the new weights, those of units among them (default: 0).
        shard_size: The largest size of a file (default: "5GB").
        check: A text, or a batch that torch.save wrote, to compare the outputs on; ``"none"`` does not compare. None takes a few
            tokens, or an image or a sound of noise.
        stream: Compare the outputs of the sibling alone, without loading the model. By itself where it would take more than half of the
            free memory (default: False).
        optimizer: The optimizer of a training to be continued: a file with its ``state_dict``, a checkpoint folder of the Trainer, or a
            folder of ``torch.distributed.checkpoint``. Its moments follow, and are written into the new folder under the same name.
        trust_remote_code: Whether code in the folder may be run (default: False).
        progress: Called with the bytes written so far, and of all.

    Returns:
        What was added: `expansion` reads the same from the folder.

    Raises:
        ExpansionError: If the folder cannot be expanded. Nothing was written.
    """
    source, target = Path(model), Path(out)
    checks.one_of("start", start, BLOCK_STARTS)
    seed = checks.whole("seed", seed, 1, least=0, error=ExpansionError)
    most = parse_size(shard_size)
    if blocks is not None:
        blocks = checks.whole("blocks", blocks, 8, error=ExpansionError)
    if units is not None:
        units = check_added_units(units)
    check_target(target)
    measurement = measurement_for(place, blocks, text, batch, stream=stream)
    described = read_description(source, trust_remote_code=trust_remote_code)
    tensors = read_weights(source)
    with quiet():
        example = check_example(check, described)
        sibling = make_sibling(described)
        planned = plan_expansion(described, tensors, sibling, measurement or place, blocks, stack, units)
        config = set_fields(described.stored, planned.fields)
        built = check_blocks(described, planned, config)
        arranged = planned.arrange(tensors, start, seed)
        total = sum(tensor.size for tensor in arranged.values())
        loads = not stream and total <= free_memory() / 2
        if example is not None and not loads:
            why = "with stream" if stream else f"for a model of {total / 1e9:.1f} GB, more than half of the free memory"
            raise ExpansionError(
                f"check must be left out or 'none' {why}, got {str(check)!r}: the model itself is not loaded then, and a small sibling "
                "of it is compared."
            )
        beside = sum(each.stat().st_size for path in files_beside(source) for each in (path, *path.rglob("*")))
        if optimizer is not None:
            beside += check_optimizer(Path(optimizer))
        with writing_to(target, total + beside + 2**20) as part:
            hashes: dict[str, str] = {}
            write_model(source, part, arranged, config, most, progress, hashes)
            checked = [check_written(part, arranged)]
            if check != "none" and not (planned.stack and start == "copy"):
                checked.append(check_function(described, sibling, planned, part, example, stream=not loads))
            moved = None
            if optimizer is not None:
                moved = move_optimizer(Path(optimizer), part, described, planned, config)
            blocks_part = planned.stack
            record = {
                "format": 1,
                "base": source.resolve().name,
                "architecture": described.model_class.__name__,
                "stack": blocks_part.rule.path if blocks_part else None,
                "other_stacks": planned.other_stacks,
                "prefix": blocks_part.stack if blocks_part else None,
                "blocks_before": blocks_part.count if blocks_part else None,
                "place": place if isinstance(place, str) else "given",
                "places": list(blocks_part.places) if blocks_part else [],
                "placing": None if measurement is None else measurement.placing.to_dict(),
                "sources": list(blocks_part.sources) if blocks_part else [],
                "new_blocks": blocks_part.new_blocks if blocks_part else [],
                "start": start,
                "seed": seed,
                "check": "; ".join(checked),
                "new_parameters": built.new_parameters,
                "linear_modules": built.linear_modules,
                "new_tensors": [name for name in arranged if planned.old_name(name) is None],
                "zero_tensors": [name for name, tensor in arranged.items() if isinstance(tensor, Zeros)],
                "optimizer": moved,
                "units": planned.units_added,
                "longer": {
                    name: [each.axis, each.parts, each.more]
                    for name in arranged
                    if (each := planned.lengthening(name)) is not None
                },
                "fields": {name: [get_field(described.stored, name), value] for name, value in planned.fields.items()},
                "hashes": {
                    name: tensor.source.digest() if isinstance(tensor, Longer) else hashes[name]
                    for name, tensor in arranged.items()
                },
                "earlier": expansion(source).data if (source / RECORD).is_file() else None,
            }
            (part / RECORD).write_text(strict_json(record, indent=1) + "\n")
            write_card(part, source)
    return expansion(target)


def check_added_units(units: int | float) -> int | float:
    """A number of units of at least 1, or a share."""
    what = "a whole number of at least 1 (for example 64) or a share between 0 and 1 (for example 0.25)"
    found = checks.number("units", units, what, error=ExpansionError)
    if isinstance(units, float) and 0 < found < 1:
        return found
    return checks.integer("units", units, what, lambda number: number >= 1, ExpansionError)


def write_card(folder: Path, source: Path) -> None:
    """A model card: that of the base, and before its text what was done."""
    record, old = expansion(folder), source / "README.md"
    data, text = record.data, old.read_text() if old.is_file() else ""
    found = re.match(r"---\n.*?\n---\n", text, re.S)
    base = data["base"]
    front = found[0] if found else f"---\nbase_model: {base}\nlibrary_name: transformers\n---\n"
    lines = [
        _CARD[0],
        f"# {base}, expanded\n",
        f"This is `{base}` ({data['architecture']}) with {record.describe()}.",
        f"Start of new blocks: `{data['start']}`. Check: {data['check']}. `{RECORD}` has the details.\n",
        *([f"Places:\n\n```\n{placing_lines(data['placing'])}\n```\n"] if data["placing"] else []),
        *(["## Train only the new blocks\n"] if data["new_blocks"] else []),
        *(f"{tool}:\n\n```\n{code}\n```\n" for tool, code in record.lines()),
        _CARD[1],
    ]
    (folder / "README.md").write_text(front + "\n".join(lines) + "\n" + text.removeprefix(front))


def undo_expansion(
    folder: str | Path,
    out: str | Path,
    *,
    shard_size: str = "5GB",
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model without the blocks that `expand` added.

    Args:
        folder: A folder that `expand` wrote, trained since or not, with its expansion.json.
        out: The folder to write, which must not exist.
        shard_size: The largest size of a file (default: "5GB").
        force: Whether to do it although the old tensors have changed since (default: False).
        progress: Called with the bytes written so far, and of all.

    Returns:
        The folder that was written.

    Raises:
        ExpansionError: If a block is no longer there, or an old tensor has changed. Nothing was written.
    """
    source, target, most = Path(folder), Path(out), parse_size(shard_size)
    check_target(target)
    data, tensors = expansion(source).data, read_weights(source)
    deeper = None
    if data["new_blocks"]:
        rule = BlockRule(data["prefix"], data["stack"], frozenset(), frozenset(), (), ())
        deeper = StackPlan(rule, data["prefix"], data["blocks_before"], tuple(data["places"]), tuple(data["sources"]))
    lacking = [name for name in data["hashes"] if name not in tensors]
    if lacking:
        raise ExpansionError(f"{source} lacks {lacking[0]}, which it had when it was expanded. Nothing was written.")
    stray = [name for name in tensors if name not in data["hashes"]]
    if stray:
        raise ExpansionError(f"{source} has {stray[0]}, which it had not when it was expanded. Nothing was written.")
    longer = {name: Lengthening(axis, parts, True, more) for name, (axis, parts, more) in data["longer"].items()}
    old: dict[str, Content] = {}
    changed = []
    for name, tensor in tensors.items():
        before = name if deeper is None else deeper.old_name(name)
        if before is not None:
            old[before] = longer[name].revert(tensor) if name in longer else tensor
            if not force and old[before].digest() != data["hashes"][name]:
                changed.append(name)
    if changed:
        raise ExpansionError(
            f"{len(changed)} old tensors of {source} have changed since, the first of them {changed[0]}: without what is new the result is "
            "neither the base nor the trained model. Give --force (force=True) to write it nevertheless."
        )
    config = json.loads((source / "config.json").read_text())
    config = set_fields(config, {name: value for name, (value, _) in data["fields"].items()})
    with writing_to(target, sum(tensor.size for tensor in old.values()) + 2**20) as part:
        write_model(source, part, old, config, most, progress)
        if data["earlier"] is not None:
            (part / RECORD).write_text(strict_json(data["earlier"], indent=1) + "\n")
        card = source / "README.md"
        if card.is_file():
            (part / "README.md").write_text(re.sub(f"{_CARD[0]}.*?{_CARD[1]}\n", "", card.read_text(), flags=re.S))
    return target
