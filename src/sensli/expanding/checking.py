"""What is checked before an expansion is said to be one: the kinds of its blocks, its files, and that it computes the same."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sensli.errors import ExpansionError
from sensli.expanding.sibling import Described, save_sibling
from sensli.expanding.weights import Content, Stored, Zeros, read_weights, write_weights
from sensli.modules.running import tensors as tensors_in
from sensli.modules.siblings import Sibling, example_for
from sensli.moves.twin.counting import find_indices

if TYPE_CHECKING:
    from sensli.expanding.expanding import ExpansionPlan


@dataclass(frozen=True)
class Built:
    """What the class calls the new blocks and their parts."""

    new_parameters: list[str]  # the names of the parameters of new blocks
    linear_modules: list[str]  # the last names of the linear layers in them, for adapters


def check_blocks(described: Described, planned: ExpansionPlan, config: Mapping[str, Any]) -> Built:
    """Whether every block that the class builds from the new configuration is of the kind of the one that it comes from."""
    from sensli.expanding.expanding import set_fields

    wider = set_fields(described.stored, planned.units.fields if planned.units else {})
    before, after = build_empty(described, wider), build_empty(described, config)
    stack = planned.stack
    if stack is None:
        return Built([], [])
    path = stack.rule.path
    old, new = (list(model.get_submodule(path).children()) for model in (before, after))
    looks_before, looks_after = _looks(old), _looks(new)
    for number, (source, is_new) in enumerate(stack.order):
        if number >= len(new) or looks_after[number] != looks_before[source]:
            where = (
                f"a new block after block {stack.places[stack.new_blocks.index(number)]}"
                if is_new
                else f"block {source}"
            )
            raise ExpansionError(
                f"{where} would be of another kind: from its place, {path}.{number}, {described.model_class.__name__} builds another one "
                "than its weights are for. Give other places, or a number of blocks after which the kinds repeat."
            )
    starts = tuple(f"{path}.{number}." for number in stack.new_blocks)
    linear = [
        name.rpartition(".")[2]
        for name, module in after.named_modules()
        if name.startswith(starts) and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    names = [name for name, _ in after.named_parameters() if name.startswith(starts)]
    return Built(names, list(dict.fromkeys(linear)))


def build_empty(described: Described, config: Mapping[str, Any]) -> Any:
    """The model of a configuration, without memory for its weights."""
    try:
        with torch.device("meta"):
            return described.model_class(type(described.config).from_dict(dict(config)))
    except Exception as error:
        raise ExpansionError(
            f"{described.model_class.__name__} cannot be built from its configuration: {' '.join(str(error).split())}"
        ) from error


def _looks(blocks: list[nn.Module]) -> list[object]:
    """Of each block the names and shapes of its parameters, and the classes, numbers and words inside but for its own number."""
    indices = {(index.module, index.name) for index in find_indices(blocks)}
    return [
        [
            *((name, tuple(parameter.shape)) for name, parameter in block.named_parameters()),
            *(
                (path, type(module).__name__, name, value)
                for path, module in block.named_modules()
                for name, value in sorted(vars(module).items())
                if isinstance(value, (int, str)) and (path, name) not in indices
            ),
        ]
        for block in blocks
    ]


def check_written(part: Path, arranged: Mapping[str, Content]) -> str:
    """Read again what was written: every old tensor has its bytes, every map that must be zero is zero."""
    found = read_weights(part)
    if found.keys() != arranged.keys():
        raise ExpansionError(
            "the files do not have all tensors: the disk or the file system failed. Nothing was written."
        )
    for name, tensor in arranged.items():
        kept = (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        if kept and isinstance(tensor, (Stored, Zeros)):
            kept = all(one == other for one, other in zip(found[name].pieces(), tensor.pieces(), strict=True))
        if not kept:
            raise ExpansionError(
                f"{name} was not written as it should be: the disk or the file system failed. Nothing was written."
            )
    return f"{len(found)} tensors read again, copies equal, zeros zero"


def check_example(check: str | Path | None, described: Described) -> dict[str, Tensor] | None:
    """What the user wants the outputs to be compared on; None for a few generated tokens."""
    if check is None or check == "none":
        return None
    path = Path(check)
    if not path.is_file():
        raise ExpansionError(
            f"check must be 'none' or a file, a text or a batch that torch.save wrote, got {str(check)!r}."
        )
    if path.suffix in (".pt", ".pth", ".safetensors"):
        return _batch(path)
    if any(described.folder.glob("tokenizer*")):
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(described.folder, local_files_only=True)(path.read_text())["input_ids"]
    else:
        ids = list(path.read_bytes())
    if not ids:
        raise ExpansionError(f"check must be a file with a text, got {path}, which is empty.")
    tokens = torch.tensor(ids[:256], device="cpu")[None]
    known = getattr(described.config.get_text_config(), "vocab_size", None)
    if known is not None and int(tokens.max()) >= known:
        raise ExpansionError(
            f"the text in {path} has the token {int(tokens.max())}, but the model knows {known}. Put its tokenizer into the folder."
        )
    return {"input_ids": tokens}


def _batch(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, weights_only=True)
    except Exception as error:
        raise ExpansionError(f"{path} cannot be read as a batch: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ExpansionError(f"check must be a file with a dict of tensors, the arguments of the model, got {path}.")
    return found


def check_function(
    described: Described,
    sibling: Sibling,
    planned: ExpansionPlan,
    part: Path,
    example: dict[str, Tensor] | None,
    *,
    stream: bool,
) -> str:
    """Compare the outputs before and after: of the models themselves, or of a sibling that is expanded in the same way."""
    exact = planned.units is None
    if stream:
        with tempfile.TemporaryDirectory() as folder:
            before, after = Path(folder) / "before", Path(folder) / "after"
            _expand_sibling(sibling, planned, before, after)
            found = compare(described.model_class, before, after, None, exact=exact)
        return f"outputs of a small sibling before and after: {found}"
    found = compare(described.model_class, described.folder, part, example, exact=exact)
    return f"outputs of the model before and after: {found}"


def _expand_sibling(sibling: Sibling, planned: ExpansionPlan, before: Path, after: Path) -> None:
    """Write a sibling as it is, and expanded in the same way: after its first possible block and after its last, with a few units."""
    from sensli.expanding.expanding import plan_expansion, set_fields

    model, stack = sibling.model, planned.stack
    tensors = save_sibling(model, before)
    described = Described(before, model.config, type(model))
    path = stack.rule.path if stack else None
    places = (0, len(list(model.get_submodule(path).children())) - 1) if path else "even"
    small = plan_expansion(described, tensors, sibling, places, None, path, 8 if planned.units else None)
    after.mkdir()
    for _ in write_weights(after, small.arrange(tensors, "zero", 0), 10**9):
        pass
    (after / "config.json").write_text(json.dumps(set_fields(described.stored, small.fields)))


def compare(
    model_class: Any, before: Path, after: Path, example: dict[str, Tensor] | None, *, exact: bool = True
) -> str:
    """How equal the outputs of two folders are. Raises if they are not, to the bit or, where units were added, within rounding."""
    one, other = (outputs_of(model_class, folder, example) for folder in (before, after))
    if one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all()):
        return "equal to the bit"
    if not exact and one.shape == other.shape:
        far, large = float((one - other).abs().max()), float(one.abs().max())
        if far <= 16 * torch.finfo(one.dtype).eps * large:  # sums with more terms are taken in another order
            return f"equal within rounding ({far:.1g} of {large:.1g})"
    raise ExpansionError(
        "the outputs before and after differ, which they must not when nothing reads what is new. Nothing was written. Please report the "
        "model's configuration; check='none' (--check none) writes the folder without comparing."
    )


def outputs_of(model_class: Any, folder: Path, example: dict[str, Tensor] | None) -> Tensor:
    """What the model in a folder gives. Raises if the folder lacks weights that the model needs."""
    model, report = model_class.from_pretrained(folder, dtype="auto", output_loading_info=True)
    lacking = sorted(report["missing_keys"])
    if lacking or report["mismatched_keys"]:
        raise ExpansionError(
            f"{folder} lacks weights that the model needs: {(lacking or sorted(report['mismatched_keys']))[0]}. Nothing was written."
        )
    model.eval()
    given = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in (example or example_for(model)).items()
    }
    with torch.no_grad():
        return next(tensors_in(logits_of(model(**given))))


def logits_of(output: Any) -> Any:
    """The part of an output that a loss would be taken of."""
    return getattr(output, "logits", output)


def free_memory() -> int:
    """Bytes of memory that are free, as the system says it."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 2**33
