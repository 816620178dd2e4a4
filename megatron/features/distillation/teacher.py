"""The teacher of a student: a model that is neither trained nor saved, at the student's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint, nothing_at
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from megatron.config.engine import FastPathsConfig
from megatron.engine.environment import return_freed_memory
from megatron.engine.evaluator import Evaluator, build_evaluator
from megatron.engine.loading import load_checkpoint
from megatron.families import spec_of
from megatron.features.distillation.divergence import TeacherHead
from megatron.features.distillation.flags import DistillationConfig
from megatron.features.distillation.objective import TaughtBatch
from megatron.features.distillation.partitioned import partition_blocks
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.parallel.loss_head import HeadInput
from megatron.parallel.mesh import Mesh
from megatron.util.processes import is_main_process


@dataclass(frozen=True)
class FoundTeacher:
    """The checkpoint of ``--load-teacher``, and the run of its model at the student's layout."""

    found: FoundCheckpoint
    config: RunConfig
    partitions: bool
    notes: tuple[str, ...] = ()

    def start(self, mesh: Mesh, device: torch.device, in_step: bool = True) -> Teacher:
        """The model with its weights; ``in_step``: every data-parallel rank will give it as many
        micro batches, so that they can share its blocks at ZeRO stage 3. Raises CheckpointError if
        the weights are damaged."""
        spec = spec_of(self.config.model, self.config.parallel)
        engine = build_evaluator(self.config, spec, mesh, device)
        source = load_checkpoint(engine, self.found, weights_only=True)
        if is_main_process():
            for note in (*self.notes, *source.notes):
                print(f"teacher: {note}", flush=True)
        del source  # and with it the mapped files
        if self.partitions and in_step and mesh.data.size > 1:
            blocks = [block for sequence in engine.sequences for block in sequence.blocks]
            partition_blocks(blocks, mesh.data)
        return_freed_memory()
        return Teacher(engine)


def find_teacher(config: RunConfig, token_count: int | None = None) -> FoundTeacher:
    """The teacher of a run, before anything that takes time; ``token_count`` is the size of the
    student's tokenizer. Raises CheckpointError if there is no such checkpoint, ConfigError if its
    model cannot teach this one at this layout."""
    flags, student = config.section(DistillationConfig), config.model
    assert flags.load_teacher is not None
    shown = f"--load-teacher {flags.load_teacher}"
    found = locate_checkpoint(flags.load_teacher)
    if found is None:
        raise CheckpointError(f"{shown}: {nothing_at(flags.load_teacher)}")
    family = found.form.family(found.folder)
    if family != student.family:
        raise ConfigError(
            f"{shown} is of the family {family}, and the student of {student.family}: they have "
            "different inputs; name a teacher of the student's family"
        )
    source = found.open(verify=False)
    source.require_model()
    _compare(flags, source.model, shown)
    model, notes = _fitted(source.model, config, token_count, shown)
    _check_layout(model, config.parallel, shown)
    parallel = config.parallel
    if parallel.pipeline_partition not in ("blocks", "parameters"):
        parallel = dataclasses.replace(parallel, pipeline_partition="blocks")
    partitions = config.engine.zero_stage == 3
    compiling = "off" if partitions else config.fast_paths.torch_compile
    trained = (type(section)() for section in config.sections if section.trains)
    config = dataclasses.replace(
        config.with_sections(*trained, DistillationConfig()),
        model=model,
        parallel=parallel,
        checkpoint=CheckpointConfig(load=flags.load_teacher),
        # In the dtype of training, without CUDA graphs, whose memory the student's would share.
        fast_paths=FastPathsConfig(torch_compile=compiling),
        engine=dataclasses.replace(config.engine, zero_stage=min(1, config.engine.zero_stage)),
    )
    return FoundTeacher(found, config, partitions, notes)


def _compare(flags: DistillationConfig, model: ModelConfig, shown: str) -> None:
    """Refuses flags that say something else of the teacher than its checkpoint."""
    for flag, given, has in (
        ("--num-layers-teacher", flags.num_layers_teacher, model.num_layers),
        ("--hidden-size-teacher", flags.hidden_size_teacher, model.hidden_size),
        (
            "--num-attention-heads-teacher",
            flags.num_attention_heads_teacher,
            model.attention.num_attention_heads,
        ),
    ):
        if given not in (None, has):
            raise ConfigError(
                f"{flag} {given}: the teacher of {shown} has {has}; give that, or leave the flag "
                "out"
            )


def _fitted(
    model: ModelConfig, config: RunConfig, token_count: int | None, shown: str
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The teacher's network with the student's length, and with its vocabulary cut as the
    student's is; and lines for the user."""
    student, ranks = config.model, config.parallel.tensor_model_parallel_size
    size, tokens = model.vocabulary.size, student.vocabulary
    if model.head != "lm":
        raise ConfigError(f"{shown} has {model.head_shown}; a teacher predicts tokens")
    notes = []
    if size != tokens.size:
        notes.append(
            f"it has {size:,} tokens and the student {tokens.size:,}; the first "
            f"{min(size, tokens.size):,} are compared, which must be the same ones"
        )
        if token_count is not None and size < token_count:
            raise ConfigError(
                f"{shown} knows {size} tokens, fewer than the {token_count} of the student's "
                "tokenizer; both need the same tokenizer"
            )
    longest = model.positions.longest
    learned = model.positions.position_embedding_type == "learned_absolute"
    if learned and longest is not None and longest < student.seq_length:
        raise ConfigError(
            f"{shown} has {longest} positions, fewer than --seq-length {student.seq_length}; "
            "give a smaller length"
        )
    each = tokens.padded // ranks
    if size > tokens.padded:
        if ranks > 1:
            multiple = -(-size // ranks)
            raise ConfigError(
                f"{shown} has {size} tokens, and the student's {tokens.padded} rows are shared by "
                f"{ranks} tensor-parallel ranks, each of which needs the same tokens of both; give "
                f"the student --make-vocab-size-divisible-by {multiple}"
            )
        each = size
    embedding = dataclasses.replace(model.embedding, make_vocab_size_divisible_by=each)
    fitted = dataclasses.replace(
        model,
        embedding=embedding,
        seq_length=student.seq_length,
        decoder_seq_length=student.decoder_seq_length,
    )
    return fitted.with_vocabulary(size, ranks), tuple(notes)


def _check_layout(model: ModelConfig, parallel: ParallelConfig, shown: str) -> None:
    """Refuses a teacher that the student's layout cannot cut."""
    ranks, stages = parallel.tensor_model_parallel_size, parallel.stages
    heads, groups = model.attention.num_attention_heads, model.attention.num_query_groups
    for what, count, fits in (
        ("attention heads", heads, heads % ranks == 0),
        ("key-value heads", groups, groups % ranks == 0 or ranks % groups == 0),
        ("features of an MLP", model.mlp.ffn_hidden_size, model.mlp.ffn_hidden_size % ranks == 0),
    ):
        if not fits:
            raise ConfigError(
                f"{shown} has {count} {what}, which --tensor-model-parallel-size {ranks} cannot "
                "share; choose a size that divides the teacher's numbers too"
            )
    if model.blocks < stages:
        raise ConfigError(
            f"{shown} has {model.blocks} layers, fewer than the {stages} stages of the pipeline; "
            "choose a smaller --pipeline-model-parallel-size"
        )


class Teacher:
    """A teacher at work."""

    def __init__(self, engine: Evaluator) -> None:
        self.engine = engine

    def teach(self, batches: Iterator[Any], count: int) -> Iterator[TaughtBatch]:
        """``count`` micro batches with the teacher's hidden states. A pipeline takes all of them
        through the teacher first; else each one is as soon as it is asked for."""
        rounds = [count] if self.engine.mesh.pipeline.size > 1 else [1] * count
        for size in rounds:
            device = self.engine.device
            own = [next(batches).to(device, non_blocking=True) for _ in range(size)]
            heads: list[TeacherHead | None] = list(self.heads(own))
            for batch, head in zip(own, heads or [None] * size, strict=True):
                yield TaughtBatch(batch, head)

    def heads(self, batches: list[Any]) -> list[TeacherHead]:
        """The teacher's output head and its input, of every micro batch; nothing on pipeline stages
        without it."""
        measure = _HeadInputs()
        with torch.no_grad():
            self.engine.prepare_evaluation()
            found = self.engine.backend.evaluate(iter(batches), len(batches), measure)
        if not found:
            return []
        assert measure.taken is not None
        _, weight_VH, bias_V, _, head = measure.taken
        return [TeacherHead(x_BPH, weight_VH, bias_V, head) for x_BPH in found]


@dataclass(frozen=True)
class _HeadInputs(Measure):
    """Ends before the head's logits, with its input [B, P, H] in place of numbers."""

    names: tuple[str, ...] = ()
    take: Any = None
    kept: list[HeadInput] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def taken(self) -> HeadInput | None:
        """What the head got last."""
        return self.kept[-1] if self.kept else None

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        self.kept[:] = [inputs]
        return {}

    def start(self, begin: LayerState) -> LayerState:
        return begin.changed(objective=self)

    def of(self, state: LayerState, batch: Any) -> Tensor:
        return self.kept[-1].x_BPH
