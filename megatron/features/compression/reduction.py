"""Initialisation of a student with layers of a deeper teacher (``layer_reduction``), and loading of
checkpoints that lack pruning scores."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint
from megatron.config import ConfigError, ModelConfig, RunConfig
from megatron.engine.loading import load_weights, together
from megatron.engine.train_engine import TrainEngine
from megatron.features.compression.layers import is_scores, matches
from megatron.features.compression.settings import LAYERS, SECTION, LayerReduction
from megatron.formats.derived import RenamedSource
from megatron.formats.features import whole_shards
from megatron.training.resume import ResumeSource

_BLOCK = re.compile(r"((?:\w+\.)?layers\.)(\d+)\.(.+)")
_STACKS = {"layers.": "encoder.layers", "encoder.layers.": "encoder.layers"}


class StudentSource(RenamedSource):
    """Student's initial weights, read from a checkpoint of its teacher.

    Class attributes, which a run sets in a subclass:
        teacher: checkpoint of the teacher.
        reduction: which of the teacher's layers and modules to copy.
        student: configuration of the student.
    """

    title = "checkpoint of a teacher"
    teacher: FoundCheckpoint
    reduction: LayerReduction
    student: ModelConfig

    @classmethod
    def family(cls, folder: Path) -> str:
        return cls.teacher.family

    @classmethod
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        cls.teacher.verify(share, shares)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.original = self.teacher.open(verify=False)
        self.original.require_model()
        whole = self.original.model
        highest = max(self.reduction.teacher_layers)
        if highest >= whole.num_layers:
            raise CheckpointError(
                f"{SECTION}.{LAYERS}.teacher_layer has the layer {highest}, and the teacher in "
                f"{folder} has the layers 0 to {whole.num_layers - 1}"
            )
        flags = replace(whole.flags(), num_layers=self.student.num_layers)
        self.model = flags.resolve().with_vocabulary(whole.vocabulary.size)
        self.tokenizer, self.notes = self.original.tokenizer, (self._note(whole.num_layers),)

    def _note(self, layers: int) -> str:
        chosen = ", ".join(map(str, self.reduction.teacher_layers))
        return f"{LAYERS}: the student begins with layers {chosen} of the {layers} of {self.folder}"

    @cached_property
    def _places(self) -> dict[str, str]:
        """Teacher's name for each parameter that the student copies, by the student's name."""
        stored, places = set(self.original.names()), {}
        for name in whole_shards(self.student):
            match = _BLOCK.fullmatch(name)
            if match is None:
                module = name.rpartition(".")[0]
                if any(_below(each, module) for each in self.reduction.other_modules):
                    places[name] = name
            elif _names_stack(self.reduction.prefix, match[1]):
                number = self.reduction.teacher_layers[int(match[2])]
                places[name] = f"{match[1]}{number}.{match[3]}"
        return {name: place for name, place in places.items() if place in stored}

    def names(self) -> Sequence[str]:
        return list(self._places)

    def original_name(self, name: str) -> str:
        return self._places[name]


def _names_stack(prefix: str, stack: str) -> bool:
    """Return whether a ``module_name_prefix`` is this trainer's or Megatron's name for ``stack``, a
    stack of blocks."""
    ours = stack.removesuffix(".")
    theirs = _STACKS.get(stack, ours)
    return prefix in (ours, theirs, f"language_model.{theirs}", f"module.language_model.{theirs}")


def _below(name: str, module: str) -> bool:
    """Return whether ``name``, an ``other_module_name``, refers to ``module`` or contains it."""
    last = name.removeprefix("language_model.").removeprefix("encoder.")
    last = last.replace("final_layernorm", "final_norm")
    return f"{module}.".startswith(f"{last}.") or matches(f"^{re.escape(name)}$", module)


def student_source(
    config: RunConfig, reduction: LayerReduction, source: ResumeSource | None
) -> ResumeSource | None:
    """Return the checkpoint from which a run with ``layer_reduction`` starts. It presents the
    deeper model in ``--load`` or ``--pretrained-checkpoint``, or else in ``--load-teacher``, as a
    student. A checkpoint that already has the run's number of layers is returned unchanged. Raises
    ConfigError if no checkpoint is given, or if teacher_layer and --num-layers differ in number."""
    model, place = config.model, f"{SECTION}.{LAYERS}"
    if len(reduction.teacher_layers) != model.num_layers:
        raise ConfigError(
            f"{place}.teacher_layer has {len(reduction.teacher_layers)} numbers, and the student "
            f"--num-layers {model.num_layers}"
        )
    teacher = next((t for s in config.sections if (t := getattr(s, "load_teacher", None))), None)
    if source is None and teacher is not None:
        checkpoint = locate_checkpoint(teacher)
        if checkpoint is None:
            raise CheckpointError(f"--load-teacher {teacher}: no checkpoint there")
        source = ResumeSource(checkpoint, f"--load-teacher {teacher}", continues=False)
    if source is None:
        raise ConfigError(
            f"{place} is enabled, and there is no teacher: name its checkpoint by --load-teacher "
            "or --pretrained-checkpoint"
        )
    if source.found.open(verify=False).model.num_layers == model.num_layers:
        return source
    members: dict[str, Any] = {"teacher": source.found, "reduction": reduction, "student": model}
    form = type("StudentOfRun", (StudentSource,), members)
    checkpoint = FoundCheckpoint(form, source.found.folder)
    return replace(source, found=checkpoint, continues=False)


def load_compressed(engine: TrainEngine, source: Source, fresh: Collection[str]) -> Source | None:
    """Load a checkpoint that lacks parameters, because it is a teacher's or has no pruning scores
    yet. Return None without loading it if it has all parameters."""
    stored = set(source.names())
    new = {name for name in engine.names.values() if name not in stored and name not in fresh}
    if not isinstance(source, StudentSource):
        new = {name for name in new if is_scores(name)}
    if not any(engine.mesh.world.gathered(new)):
        return None
    together(engine, lambda: load_weights(engine, source, {*fresh, *new}))
    return source
