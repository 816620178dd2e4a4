"""DeepSpeed checkpoints: locate them, read their model configuration and counters, and read the
folders that engines save, in any layout and at any ZeRO stage."""

from __future__ import annotations

import dataclasses
import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.folder import TRACKER, standing_in
from megatron.checkpoint.manifest import CONFIG, STATE
from megatron.checkpoint.source import Source
from megatron.config import ConfigError, ModelConfig, RunConfig, TokenizerConfig, Vocabulary
from megatron.formats.deepspeed_folders import neox
from megatron.formats.deepspeed_folders.engine_files import EngineFiles
from megatron.formats.deepspeed_folders.naming import (
    EngineNaming,
    ForeignNaming,
    Naming,
    RankNaming,
)
from megatron.formats.deepspeed_folders.neox import StoredTensors
from megatron.formats.features import buffers_of, whole_shards
from megatron.formats.legacy_megatron.arguments import (
    model_of_arguments,
    tokenizer_of_arguments,
    unpadded_vocabulary,
)
from megatron.formats.universal_info import COUNTERS, RUN
from megatron.formats.unpickle import Inert, load_pickle
from megatron.util.errors import one_line

UNIVERSAL_TRACKER = "latest_universal"
UNIVERSAL_SUFFIX = "_universal"

_MODEL_STATES = re.compile(r"(?:(?:(?:bf|fp)16_)?zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_NUMBER = re.compile(r"\d+")


def is_universal(folder: Path) -> bool:
    """Return whether a folder is a universal checkpoint."""
    return (folder / "zero").is_dir()


def is_engine_folder(folder: Path) -> bool:
    """Return whether a folder is a checkpoint saved by a DeepSpeed engine."""
    if not folder.is_dir() or is_universal(folder):
        return False
    return any(_MODEL_STATES.fullmatch(name) for name in os.listdir(folder))


def is_of_transformers(folder: Path) -> bool:
    """Return whether an engine's folder is next to a Hugging Face model's config.json, as
    transformers' Trainer and accelerate write it. Unlike other trainers' folders, such a folder has
    neither arguments nor a model configuration."""
    config = folder.parent / CONFIG
    if (folder / CONFIG).is_file() or (folder / "configs").is_dir() or not config.is_file():
        return False
    content = read_json(config, lenient=True)
    if not isinstance(content, dict) or "model_type" not in content:
        return False
    states = load_pickle(min(p for p in folder.iterdir() if _MODEL_STATES.fullmatch(p.name)))
    return isinstance(states, dict) and "args" not in states


def locate(
    path: Path, wanted: str | None, tracker: str, fits: Callable[[Path], bool], suffix: str = ""
) -> Path | None:
    """Find a checkpoint's folder; see :meth:`Source.locate`. If a save was killed while
    replacing a checkpoint, this is the hidden folder of the old one. ``tracker`` is the name of
    the file that points to the newest checkpoint. ``suffix`` follows ``global_step<N>`` in a
    checkpoint's name."""
    if folder := _present(path, fits):
        tag = path.name
        if wanted not in (None, tag, tag.removeprefix("global_step").removesuffix(suffix)):
            raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
        return folder
    if not path.is_dir():
        return None
    known = {
        name: folder
        for child in path.iterdir()
        if (name := _tag(child.name)) and (folder := _present(path / name, fits))
    }
    if not known:
        return None
    listed = ", ".join(sorted(known, key=_newest_last))
    if wanted is not None:
        for name in (wanted, f"global_step{wanted}{suffix}"):
            if name in known:
                return known[name]
        raise CheckpointError(f"{path} has no checkpoint {wanted}; it has {listed}")
    file = path / tracker
    if not file.is_file():
        return known[max(known, key=_newest_last)]
    named = file.read_text(errors="replace").strip()
    if named not in known:
        raise CheckpointError(f"{file} names {named!r}, which is not in {path}; it has {listed}")
    return known[named]


def _present(final: Path, fits: Callable[[Path], bool]) -> Path | None:
    """Return a checkpoint's folder ``final``, or the folder to which a killed save moved it. Return
    None if neither ``fits``."""
    if fits(final):
        return final
    replaced = standing_in(final)
    return replaced if replaced is not None and fits(replaced) else None


def _tag(name: str) -> str | None:
    """Return the checkpoint name that a folder name stands for, or None if the folder is being
    written or deleted."""
    if not name.startswith("."):
        return name
    return name[1:].removesuffix(".replaced") if name.endswith(".replaced") else None


def _newest_last(name: str) -> tuple[list[int], str]:
    return [int(number) for number in _NUMBER.findall(name)], name


class NamedFolder(Source):
    """Folder whose own parameter names are mapped to canonical names by a :class:`Naming`."""

    _naming: Naming

    @classmethod
    def family(cls, folder: Path) -> str:
        """See :meth:`Source.family`. Other trainers' folders contain GPTs."""
        run = own_run(folder, {})
        return super().family(folder) if run is None else run.model.family

    def _describe(self, states: Mapping[str, Any], tensors: StoredTensors) -> Description:
        description = describe(self.folder, states, tensors)
        self.run, self.model, self.tokenizer = (
            description.run,
            description.model,
            description.tokenizer,
        )
        self.state = description.state
        if not self.model.vocabulary.size:
            raise CheckpointError(f"{self.folder} does not say how large its vocabulary is")
        try:
            whole_shards(self.model)
        # raised by torch for an invalid size
        except (TypeError, ValueError, RuntimeError) as error:
            reason = one_line(str(error).partition("\n")[0])
            raise CheckpointError(f"{self.folder} has sizes of no network: {reason}") from None
        return description

    def names(self) -> Sequence[str]:
        return list(self._naming.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._naming.shapes:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return self._naming.shapes[name]


class DeepSpeedFolder(NamedFolder):
    """Folder of this project's ``--checkpoint-format deepspeed``, of Megatron-DeepSpeed (BLOOM) or
    of GPT-NeoX. If there are ZeRO files, weights are the float32 master weights. Raises
    CheckpointError if a file is missing or malformed, or if the model is not supported."""

    title = "checkpoint of DeepSpeed's engine"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = EngineFiles(folder)
        description = self._describe(
            self._files.model_states(), StoredTensors(self._files.names, self._elements)
        )
        experts = "cut" if description.run is None else description.run.parallel.experts_over_tensor
        self._naming: RankNaming = EngineNaming(self.model, self._files.tensor_size, experts)
        if description.foreign is not None:
            self._naming = description.foreign(self.model, self._files.names(), folder)
            self.state["optimizer_step"] = self._files.optimizer_step()
        self._moments = self._files.moments()
        if description.foreign and not self._moments:
            self.state = {}

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        folder = locate(path, wanted, TRACKER, is_engine_folder)
        return None if folder is not None and is_of_transformers(folder) else folder

    def _elements(self, name: str) -> int:
        shares = self._files.shares(name, "weight", "{}.{}".format)
        return sum(share.numel() for share in shares or ())

    def kinds(self, name: str) -> Sequence[str]:
        return ["weight"] if name in buffers_of(self.model) else ["weight", *self._moments]

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        self.shape(name)
        naming, parts = self._naming, []
        for part in naming.parts(name):
            shares = self._files.shares(part, kind, naming.registered_name)
            if shares is None:
                raise CheckpointError(f"{self.folder} has no {kind} of {name} ({part})")
            parts.append(shares)
        try:
            return naming.join(name, kind, parts).float()
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {kind} of {error}") from None


_POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
"""BigScience's enumeration of position embeddings."""


class Description(NamedTuple):
    """Everything about a checkpoint except its tensors. If another trainer wrote it, ``run`` is
    None, the optimizer's step is unknown, and ``foreign`` maps its parameter names."""

    run: RunConfig | None
    model: ModelConfig
    tokenizer: TokenizerConfig | None
    state: dict[str, Any]
    foreign: type[ForeignNaming] | None = None


def own_run(folder: Path, states: Mapping[str, Any]) -> RunConfig | None:
    """Return the configuration of this project's run that saved a checkpoint. Return None if
    another trainer saved it. Raises CheckpointError if it is malformed."""
    own = folder / CONFIG
    parts = read_json(own, non_finite=True) if own.is_file() else states.get(RUN)
    if parts is None:
        return None
    try:
        return RunConfig.from_dict(parts)
    except (TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{own}: not a configuration: {error}") from None


def describe(folder: Path, states: Mapping[str, Any], tensors: neox.StoredTensors) -> Description:
    """Derive a checkpoint's configuration and counters from its model states and tensors. Raises
    CheckpointError if the model configuration is missing or not supported."""
    run = own_run(folder, states)
    if run is not None:
        file = folder / STATE
        state = read_json(file) if file.is_file() else states.get(COUNTERS, {})
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{file} is {state!r:.60}; expected an object of counters")
        tokenizer = run.tokenizer if run.tokenizer.tokenizer_type else None
        return Description(run, run.model, tokenizer, dict(state))
    args = states.get("args")
    arguments = vars(args) if isinstance(args, Namespace) else {}
    settings, naming = neox.find_settings(folder), ForeignNaming
    if settings is not None:
        model, naming = neox.model_of(settings, args, folder, tensors), neox.NeoXNaming
    elif isinstance(args, Namespace):
        model = _megatron_deepspeed(arguments, folder)
    elif isinstance(args, Mapping):
        raise CheckpointError(
            f"{folder} is of GPT-NeoX, whose configuration files are missing: put the *.yml files "
            f"of the run into {folder / 'configs'}"
        )
    else:
        raise CheckpointError(
            f"{folder} does not describe the network: it has no {CONFIG}, and its model states "
            "have neither the args of a Megatron-DeepSpeed run nor a configuration of this project"
        )
    tokenizer = tokenizer_of_arguments(arguments)
    samples = arguments.get("consumed_train_samples")
    counters = {
        "iteration": int(states.get("iteration", states.get("global_steps", 0))),
        "consumed_samples": int(states.get("global_samples", 0) if samples is None else samples),
        "loss_scaler": {},
    }
    return Description(None, model, tokenizer, counters, naming)


def _megatron_deepspeed(arguments: Mapping[str, Any], folder: Path) -> ModelConfig:
    """Return the model that a run's arguments describe. If the unpadded vocabulary size is missing,
    as in BLOOM's published models, all rows of the token embedding are tokens. Raises
    CheckpointError if an argument is missing or not supported."""
    known = dict(arguments)
    positions = known.get("position_embedding_type")
    if isinstance(positions, Inert):
        number = (vars(positions).get("args") or (0,))[0]
        known["position_embedding_type"] = _POSITIONS.get(number, str(number))
    if known.get("window_size") == 7:
        del known["window_size"]  # the default of a flag for Megatron's vision models
    model = model_of_arguments(known, folder)
    rows = known.get("padded_vocab_size")
    if not isinstance(rows, int):
        raise CheckpointError(f"{folder}: the run's arguments have no padded_vocab_size")
    vocabulary = Vocabulary(unpadded_vocabulary(known, rows) or rows, rows)
    return dataclasses.replace(model, vocabulary=vocabulary)
