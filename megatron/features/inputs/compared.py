"""Inputs of a run other than its data that must not change when the run is resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import STATE
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint
from megatron.config import RunConfig
from megatron.config.features import features
from megatron.features.inputs.flags import ChangedDataFlags
from megatron.formats.digests import checkpoint_digest, tokenizer_digest
from megatron.training.resume import ResumeSource
from megatron.util.digests import digest_of_sample

INPUTS = "inputs"
"""Key of the inputs in ``state.json``."""
BASE = "model that it began from"
TOKENIZER, TEMPLATE = "tokenizer", "chat template"

Inputs = Mapping[str, Mapping[str, str]]
"""Inputs by kind, each with its ``path``, the ``folder`` that the path resolves to, and a digest of
the ``content``."""


def inputs_of(config: RunConfig, origin: ResumeSource | None) -> Inputs:
    """Return the inputs of a run that starts from a checkpoint. Missing models are left out; the
    code that needs them reports the error."""
    base = config.checkpoint.pretrained_checkpoint
    inputs: dict[str, Mapping[str, str]] = {}
    if origin is not None and not origin.continues:
        inputs[BASE] = model_input(str(origin.found.folder), origin.found)
    elif base is not None:
        with contextlib.suppress(CheckpointError):  # a damaged model is reported when it is read
            inputs |= located_model(BASE, base)
    for feature in features().values():
        inputs |= feature.inputs(config)
    return inputs


def located_model(what: str, path: str | None) -> Inputs:
    """Return the model at a path as an input called ``what``. Empty if there is no path or
    checkpoint."""
    one = locate_checkpoint(path) if path else None
    return {what: model_input(str(path), one)} if one else {}


def model_input(path: str, found: FoundCheckpoint) -> dict[str, str]:
    """Return the input for a checkpoint, given the path by which the user named it."""
    return file_input(path, found.folder, checkpoint_digest(found.folder))


def file_input(path: str, folder: Path, content: str) -> dict[str, str]:
    """Return the input for a path, the folder that it resolves to, and a digest of the content."""
    return {"path": path, "folder": str(folder.absolute()), "content": content}


def text_inputs(config: RunConfig, template: str | None) -> Inputs:
    """Return the tokenizer and chat template as inputs, for a run that tokenizes its examples."""
    named = config.tokenizer
    inputs = {}
    path = named.tokenizer_model or named.vocab_file
    if path is not None:
        inputs[TOKENIZER] = file_input(path, Path(path), tokenizer_digest(named))
    if template is not None:
        file = Path(template)
        inputs[TEMPLATE] = file_input(template, file.parent, digest_of_sample(file))
    return inputs


def recorded_inputs(folder: Path) -> Inputs:
    """Return the inputs recorded by the run that wrote a checkpoint. Empty if there is no record.
    Raises CheckpointError if the record is malformed."""
    path = folder / STATE
    state = read_json(path) if path.is_file() else {}
    inputs = state.get(INPUTS, {}) if isinstance(state, dict) else {}
    keys = ("path", "folder", "content")
    try:
        return {what: {key: str(one[key]) for key in keys} for what, one in inputs.items()}
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: {INPUTS} is malformed") from None


def changed_inputs(before: Inputs, now: Inputs) -> list[str]:
    """Describe the differences between the inputs of a run and of the previous run, one per
    line."""
    lines = []
    for what, new in now.items():
        old = before.get(what)
        if old is None or old["content"] == new["content"] or _has_moved_on(what, old, new):
            continue
        if Path(old["path"]).absolute() == Path(new["path"]).absolute():
            lines.append(f"the content of the {what}, {new['path']}, has changed since")
        else:
            lines.append(f"the {what} was {old['path']} and is {new['path']}")
    if TOKENIZER in before and TOKENIZER in now and (TEMPLATE in before) != (TEMPLATE in now):
        was, is_now = (
            one[TEMPLATE]["path"] if TEMPLATE in one else "that of the tokenizer"
            for one in (before, now)
        )
        lines.append(f"the {TEMPLATE} was {was} and is {is_now}")
    return lines


def _has_moved_on(what: str, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Return whether the path is a folder of checkpoints that has newer ones now, while the
    checkpoint that the run started from is unchanged."""
    folder = Path(old["folder"])
    return (
        what == BASE
        and folder.parent == Path(new["folder"]).parent == Path(new["path"]).absolute()
        and folder.is_dir()
        and checkpoint_digest(folder) == old["content"]
    )


def compared_inputs(config: RunConfig, origin: ResumeSource | None) -> tuple[Inputs, list[str]]:
    """Return the inputs to record in the checkpoints of a run, and their differences from those of
    the checkpoint to resume from. Raises CheckpointError if there are any, unless
    ``--allow-changed-data`` is given."""
    now = inputs_of(config, origin)
    if origin is None or not origin.continues or config.checkpoint.reset_iteration:
        return now, []
    before = recorded_inputs(origin.found.folder)
    lines = changed_inputs(before, now)
    if lines and not ChangedDataFlags.of(config.checkpoint).allow_changed_data:
        raise CheckpointError(
            f"{origin.found.folder} was saved by a run with other inputs: {'; '.join(lines)}; name "
            "those of then, begin another run from its weights (--finetune, and another --save), "
            "or give --allow-changed-data to continue with those of now"
        )
    kept = {what: one for what, one in before.items() if what != TEMPLATE}
    return {**kept, **now}, lines
