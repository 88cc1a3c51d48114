"""`expand`: a saved model with more blocks, written as a new folder, all or nothing, with what is new and how to train it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensli.expand.record import RECORD, ExpansionRecord, expansion
from sensli.expand.sibling import (
    BlockRule,
    Described,
    build_sibling,
    example_for,
    find_rules,
    generic,
    read_description,
)
from sensli.expand.weights import ExpansionError, Stored, parse_size, read_weights, write_weights
from sensli.modules import checks
from sensli.modules.running import tensors as tensors_in
from sensli.modules.running import to_device
from sensli.text.commands import PLACES
from sensli.text.records import dumps as strict_json

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf)$|.*\.index\.json$")
Progress = Callable[[int, int], None]  # bytes written, of how many

# ---- Where new blocks go.


def choose_places(place: str | Sequence[int], blocks: int | None, count: int) -> list[int]:
    """After which of so many blocks the new ones go, in ascending order; several may follow the same one."""
    if not isinstance(place, str):
        places = sorted(checks.whole("place", each, 3, least=0) for each in place)
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
        raise ExpansionError("blocks must say how many blocks to add (for example 8), got None.")
    blocks = checks.whole("blocks", blocks, 8)
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


# ---- What will be written: every tensor under its new number, and the configuration.


@dataclass(frozen=True)
class StackPlan:
    """A planned expansion of one stack of blocks.

    Attributes:
        rule: How the stack grows in files.
        stack: What the names of its tensors begin with in this folder.
        count: How many blocks it has.
        places: After which of them the new ones go.
    """

    rule: BlockRule
    stack: str
    count: int
    places: tuple[int, ...]

    @property
    def order(self) -> list[tuple[int, bool]]:
        """For each block of the result, which one it comes from and whether it is new."""
        new = Counter(self.places)
        return [(each, copied) for each in range(self.count) for copied in (False, *(True,) * new[each])]

    @property
    def new_blocks(self) -> list[int]:
        """The numbers of the new blocks in the result."""
        return [number for number, (_, new) in enumerate(self.order) if new]

    def arrange(self, tensors: Mapping[str, Stored], start: str) -> dict[str, Stored]:
        """Every tensor of the result under its name, each block where the first of the stack was."""
        parts: dict[int, dict[str, Stored]] = {}
        result: dict[str, Stored] = {}
        others: dict[str, Stored] = {}
        for name, tensor in tensors.items():
            match = re.match(rf"{re.escape(self.stack)}(\d+)\.(.+)", name)
            if match:
                parts.setdefault(int(match[1]), {})[match[2]] = tensor
            else:
                others[name] = tensor
        for number, (source, new) in enumerate(self.order):
            for rest, tensor in parts[source].items():
                zero = new and start == "zero" and generic(rest) in self.rule.zero
                result[f"{self.stack}{number}.{rest}"] = tensor.zeros() if zero else tensor
        return {**others, **result}

    def old_name(self, name: str) -> str | None:
        """What a tensor of the result was called before; None if it is new."""
        match = re.match(rf"{re.escape(self.stack)}(\d+)\.(.+)", name)
        if not match:
            return name
        source, new = self.order[int(match[1])]
        return None if new else f"{self.stack}{source}.{match[2]}"

    def configure(self, stored: dict[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the new number of blocks. ``full`` has the fields that the folder leaves to their defaults."""
        found = json.loads(json.dumps(stored))
        for name in self.rule.counts:
            _set(found, name, _get(full, name) + len(self.places))
        for name in self.rule.lists:
            before = list(_get(full, name))
            _set(found, name, [before[source] for source, _ in self.order])
        return found


def _get(data: Mapping[str, Any], path: str) -> Any:
    for name in path.split("."):
        data = data[name]
    return data


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *inside, last = path.split(".")
    for name in inside:
        data = data.setdefault(name, {})
    data[last] = value


def plan(
    described: Described, tensors: Mapping[str, Stored], place: str | Sequence[int], blocks: int | None
) -> StackPlan:
    """Find on a sibling how the model grows, and bind it to the tensors of the folder."""
    rules = find_rules(described)
    for rule in rules:
        stack = _stack_in(tensors, rule)
        if stack is not None:
            break
    else:
        raise ExpansionError(
            f"the tensors of {described.folder} are called differently than those of a {described.model_class.__name__}: none begins with "
            f"{rules[0].stack!r}. Load the model with from_pretrained and save_pretrained it again."
        )
    numbers = {int(match[1]) for name in tensors if (match := re.match(rf"{re.escape(stack)}(\d+)\.", name))}
    count = len(numbers)
    full = described.config.to_dict()
    if numbers != set(range(count)) or any(_get(full, name) != count for name in rule.counts):
        said = ", ".join(f"{name}={_get(full, name)}" for name in rule.counts)
        raise ExpansionError(
            f"{described.folder} has tensors of {count} blocks ({stack}0 to {stack}{max(numbers)}), but its configuration says {said}. A "
            "shard may be missing. Get the folder again."
        )
    unknown = {
        generic(match[1]) for name in tensors if (match := re.match(rf"{re.escape(stack)}\d+\.(.+)", name))
    } - rule.known
    if unknown:
        raise ExpansionError(
            f"the blocks of {described.folder} have {sorted(unknown)[0]}, which a small {described.model_class.__name__} has not, so it is "
            "not known whether it must be zero."
        )
    return StackPlan(rule, stack, count, tuple(choose_places(place, blocks, count)))


def _stack_in(tensors: Mapping[str, Stored], rule: BlockRule) -> str | None:
    """What the names of the stack begin with in a folder: a model and its base are saved with and without the name of the base."""
    shorter = rule.stack.partition(".")[2]
    for start in (rule.stack, shorter):
        if start and any(name.startswith(f"{start}0.") for name in tensors):
            return start
    return None


# ---- Writing, all or nothing.


@contextmanager
def writing_to(out: Path, needed: int) -> Iterator[Path]:
    """A folder beside the target that becomes it in the end; whatever goes wrong, nothing is left of it."""
    if out.exists():
        raise ExpansionError(f"out must be a folder that does not exist yet, got {out}, which does.")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise ExpansionError(f"out must lie in a folder that exists, got {out}: there is no {parent}.")
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ExpansionError(
            f"there is no room for {needed / 1e9:.1f} GB in {parent}, which has {free / 1e9:.1f} GB left."
        )
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=parent))
    try:
        yield part
        part.chmod(0o755)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def copy_rest(source: Path, target: Path) -> list[str]:
    """Everything of a model folder but weights and configuration: tokenizer, chat template, generation, processor, code."""
    kept = []
    for path in sorted(source.iterdir()):
        if _WEIGHTS.match(path.name) or path.name in ("config.json", "README.md", RECORD) or path.name.startswith("."):
            continue
        if path.is_dir():
            continue  # folders of a training, such as checkpoint-500
        shutil.copy2(path, target / path.name)
        kept.append(path.name)
    return kept


@dataclass(frozen=True)
class Expanded:
    """What `expand` has written.

    Attributes:
        record: What expansion.json says, and where it lies.
        check: How it was checked that the function is kept, in words.
        kept: Whether it is.
    """

    record: ExpansionRecord
    check: str
    kept: bool


def expand(
    model: str | Path,
    out: str | Path,
    blocks: int | None = None,
    *,
    place: str | Sequence[int] = "even",
    start: str = "zero",
    shard_size: str = "5GB",
    stream: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Expanded:
    """Write a saved model with more blocks into a new folder.

    The weights are copied as bytes, file by file; no more than one piece of a tensor is in memory. What a new block must look like is
    found on a small sibling of the model. The result loads with ``from_pretrained`` everywhere, and computes the same to the bit.

    Args:
        model: A folder that ``save_pretrained`` wrote.
        out: The folder to write, which must not exist.
        blocks: How many blocks to add.
        place: Where: ``"even"``, ``"middle"``, ``"top"``, ``"bottom"``, or the numbers of the blocks that are to be followed by a new one
            (default: "even").
        start: ``"zero"`` makes every new block an identity, ``"copy"`` a copy of the block before it, which changes the output
            (default: "zero").
        shard_size: The largest size of a file (default: "5GB").
        stream: Check on the sibling alone, without loading the model. By itself where it would take more than half of the free memory
            (default: False).
        trust_remote_code: Whether code in the folder may be run (default: False).
        progress: Called with the bytes written so far, and of all.

    Returns:
        What was written.

    Raises:
        ExpansionError: If the folder cannot be expanded. Nothing was written.
    """
    source, target = Path(model), Path(out)
    checks.one_of("start", start, ("zero", "copy"))
    most = parse_size(shard_size)
    described = read_description(source, trust_remote_code=trust_remote_code)
    tensors = read_weights(source)
    planned = plan(described, tensors, place, blocks)
    arranged = planned.arrange(tensors, start)
    total = sum(tensor.size for tensor in arranged.values())
    with writing_to(target, total + 2**20) as part:
        hashes: dict[str, str] = {}
        done = 0
        for size, found in write_weights(part, arranged, most):
            done += size
            hashes |= found
            if progress is not None:
                progress(done, total)
        config = planned.configure(described.stored, described.config.to_dict())
        (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        copy_rest(source, part)
        check, kept = check_files(planned, tensors, part, start), True
        if start == "zero":
            check, kept = check_function(described, planned, part, stream=stream)
        record = describe(planned, described, config, arranged, hashes, start=start, check=check)
        (part / RECORD).write_text(strict_json(record, indent=1) + "\n")
        write_card(part, source, expansion(part))
    return Expanded(expansion(target), check, kept)


def describe(
    planned: StackPlan,
    described: Described,
    config: Mapping[str, Any],
    arranged: Mapping[str, Stored],
    hashes: Mapping[str, str],
    *,
    start: str,
    check: str,
) -> dict[str, Any]:
    """What expansion.json says: enough to know what is new, to train it alone and to undo it."""
    new = [name for name in arranged if planned.old_name(name) is None]
    return {
        "format": 1,
        "base": described.folder.resolve().name,
        "architecture": described.model_class.__name__,
        "stack": planned.rule.path,
        "prefix": planned.stack,
        "blocks_before": planned.count,
        "places": list(planned.places),
        "new_blocks": planned.new_blocks,
        "start": start,
        "check": check,
        "new_parameters": names_of_new(described, config, planned),
        "new_tensors": new,
        "zero_tensors": [name for name in new if arranged[name].file is None],
        "counts": list(planned.rule.counts),
        "lists": list(planned.rule.lists),
        "hashes": dict(hashes),
    }


def names_of_new(described: Described, config: Mapping[str, Any], planned: StackPlan) -> list[str]:
    """The parameters of the new blocks, as the model itself calls them: asked of one without memory."""
    with torch.device("meta"):
        model = described.model_class(type(described.config).from_dict(dict(config)))
    starts = tuple(f"{planned.rule.path}.{number}." for number in planned.new_blocks)
    return [name for name, _ in model.named_parameters() if name.startswith(starts)]


def write_card(folder: Path, source: Path, record: ExpansionRecord) -> None:
    """A model card: that of the base, and before it what was done."""
    data, old = record.data, source / "README.md"
    text = old.read_text() if old.is_file() else ""
    front = re.match(r"---\n.*?\n---\n", text, re.S)
    head = front[0] if front else f"---\nbase_model: {data['base']}\n---\n"
    added = ", ".join(map(str, data["new_blocks"]))
    lines = [
        head,
        f"# {data['base']}, expanded by {len(data['new_blocks'])} blocks\n",
        f"This is `{data['base']}` ({data['architecture']}) with {len(data['new_blocks'])} new blocks in `{data['stack']}`: {added}.",
        f"Start of the new blocks: `{data['start']}`. Check: {data['check']}. `{RECORD}` has the details.\n",
        "## Train only the new blocks\n",
        *(f"{tool}:\n\n```\n{code}\n```\n" for tool, code in record.lines()),
        text.removeprefix(front[0] if front else ""),
    ]
    (folder / "README.md").write_text("\n".join(lines))


# ---- The way back.


def undo_expansion(folder: str | Path, out: str | Path, *, shard_size: str = "5GB", force: bool = False) -> Path:
    """Write the model without the blocks that `expand` added.

    Args:
        folder: A folder that `expand` wrote, trained since or not.
        out: The folder to write, which must not exist.
        shard_size: The largest size of a file (default: "5GB").
        force: Whether to do it although the old tensors have changed since (default: False).

    Returns:
        The folder that was written.

    Raises:
        ExpansionError: If a block is no longer there, or an old tensor has changed. Nothing was written.
    """
    source, target, most = Path(folder), Path(out), parse_size(shard_size)
    record = expansion(source)
    data, tensors = record.data, read_weights(source)
    rule = BlockRule(
        data["prefix"], data["stack"], frozenset(), frozenset(), tuple(data["counts"]), tuple(data["lists"])
    )
    planned = StackPlan(rule, data["prefix"], data["blocks_before"], tuple(data["places"]))
    lacking = [name for name in data["hashes"] if name not in tensors]
    if lacking:
        raise ExpansionError(f"{source} lacks {lacking[0]}, which it had when it was expanded. Nothing was written.")
    old = {name: before for name in tensors if (before := planned.old_name(name)) is not None}
    if not force:
        changed = [name for name in old if tensors[name].digest() != data["hashes"].get(name)]
        if changed:
            raise ExpansionError(
                f"{len(changed)} old tensors of {source} have changed since, the first of them {changed[0]}: without the new blocks the "
                "result is neither the base nor the trained model. Give --force (force=True) to write it nevertheless."
            )
    stored = json.loads((source / "config.json").read_text())
    for name in rule.counts:
        _set(stored, name, data["blocks_before"])
    for name in rule.lists:
        kept = [value for value, (_, new) in zip(_get(stored, name), planned.order, strict=True) if not new]
        _set(stored, name, kept)
    with writing_to(target, sum(tensors[name].size for name in old) + 2**20) as part:
        for _ in write_weights(part, {before: tensors[name] for name, before in old.items()}, most):
            pass
        (part / "config.json").write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
        copy_rest(source, part)
    return target


# ---- Checking the result.


def check_files(planned: StackPlan, tensors: Mapping[str, Stored], part: Path, start: str) -> str:
    """Read again what was written: every old tensor has its bytes, every map that must be zero is zero."""
    found = read_weights(part)
    for name, tensor in found.items():
        old = planned.old_name(name)
        if old is not None and (tensor.dtype, tensor.shape) != (tensors[old].dtype, tensors[old].shape):
            raise ExpansionError(
                f"{name} was written with another shape than {old}: the disk or the file system failed."
            )
        if old is None and start == "zero":
            rest = re.sub(rf"^{re.escape(planned.stack)}\d+\.", "", name)
            if generic(rest) in planned.rule.zero and not tensor.is_zero():
                raise ExpansionError(f"{name} must be zero and is not: the disk or the file system failed.")
    return f"{len(found)} tensors were read again: {len(tensors)} old ones, and the maps that must be zero are zero"


def check_function(described: Described, planned: StackPlan, part: Path, *, stream: bool) -> tuple[str, bool]:
    """Compare the outputs before and after: of the models themselves, or of a sibling that is expanded in the same way."""
    size = sum(tensor.size for tensor in read_weights(described.folder).values())
    if stream or 2 * size > free_memory() / 2:
        with tempfile.TemporaryDirectory() as folder:
            before, after = Path(folder) / "before", Path(folder) / "after"
            torch.manual_seed(0)
            model = build_sibling(described, 3)
            model.save_pretrained(before)
            tensors = read_weights(before)
            count = len(
                {
                    name[len(planned.rule.stack) :].split(".")[0]
                    for name in tensors
                    if name.startswith(planned.rule.stack)
                }
            )
            small = StackPlan(planned.rule, planned.rule.stack, count, (0, count - 1))
            after.mkdir()
            for _ in write_weights(after, small.arrange(tensors, "zero"), 10**9):
                pass
            stored = json.loads((before / "config.json").read_text())
            (after / "config.json").write_text(json.dumps(small.configure(stored, model.config.to_dict())))
            same = same_outputs(type(model), before, after)
        return f"outputs of a small sibling before and after: {'equal to the bit' if same else 'different'}", same
    same = same_outputs(described.model_class, described.folder, part)
    return f"outputs of the model before and after: {'equal to the bit' if same else 'different'}", same


def same_outputs(model_class: Any, before: Path, after: Path) -> bool:
    """Whether two folders compute the same, to the bit, on an example."""
    outputs = []
    for folder in (before, after):
        model = model_class.from_pretrained(folder, dtype="auto").eval()
        with torch.no_grad():
            example = to_device(example_for(model), model.device)
            example = {
                name: value.to(model.dtype) if value.is_floating_point() else value for name, value in example.items()
            }
            output = model(**example)
        outputs.append(next(tensors_in(output)))
        del model
    return torch.equal(*outputs)


def free_memory() -> int:
    """Bytes of memory that are free, as the system says it."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found[1]) * 1024 if found else 2**33
    except OSError:
        return 2**33
