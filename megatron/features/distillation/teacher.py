"""Teacher of a student: a model that has the student's layout and is neither trained nor saved, and
the cache of its outputs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint, nothing_at
from megatron.config import CheckpointConfig, ConfigError, ModelConfig, ParallelConfig, RunConfig
from megatron.config.engine import FastPathsConfig
from megatron.data.samples import SampleDataset
from megatron.engine.loading import load_checkpoint
from megatron.families import spec_of
from megatron.features.distillation.divergence import TeacherHead, TopTokens, linear_top_tokens
from megatron.features.distillation.flags import DistillationConfig
from megatron.features.distillation.objective import TaughtBatch
from megatron.features.distillation.partitions import partition_blocks
from megatron.features.evaluation.evaluator import Evaluator, build_evaluator
from megatron.formats.digests import checkpoint_digest
from megatron.formats.tensors import save_tensors
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.parallel.loss_head import HeadInput
from megatron.parallel.mesh import Mesh
from megatron.util.digests import digest_of_parts
from megatron.util.files import replacing, write_whole
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process, return_freed_memory
from megatron.util.progress import progress_bar


@dataclass(frozen=True)
class FoundTeacher:
    """Checkpoint of ``--load-teacher``, and its model's configuration in the student's layout."""

    found: FoundCheckpoint
    config: RunConfig
    partitions: bool
    notes: tuple[str, ...] = ()

    def start(self, mesh: Mesh, device: torch.device, in_step: bool = True) -> Teacher:
        """Load the teacher. Set ``in_step`` if every data-parallel rank runs the same number of
        micro batches; only then can blocks be partitioned, as at ZeRO stage 3. Raises
        CheckpointError if the weights are damaged."""
        spec = spec_of(self.config.model, self.config.parallel)
        engine = build_evaluator(self.config, spec, mesh, device)
        source = load_checkpoint(engine, self.found, weights_only=True)
        if is_main_process():
            for note in (*self.notes, *source.notes):
                print(f"teacher: {note}", flush=True)
        del source  # also closes the mapped files
        if self.partitions and in_step and mesh.dense.size > 1:
            blocks = [block for sequence in engine.sequences for block in sequence.blocks]
            partition_blocks(blocks, mesh)
        return_freed_memory()
        return Teacher(engine)


def find_teacher(config: RunConfig, token_count: int | None = None) -> FoundTeacher:
    """Find the teacher of a run, before any slow work. ``token_count`` is the number of tokens of
    the student's tokenizer. Raises CheckpointError if the checkpoint does not exist, and
    ConfigError if its model does not suit the student and its layout."""
    flags, student = config.section(DistillationConfig), config.model
    assert flags.load_teacher is not None
    shown = f"--load-teacher {flags.load_teacher}"
    checkpoint = locate_checkpoint(flags.load_teacher)
    if checkpoint is None:
        raise CheckpointError(f"{shown}: {nothing_at(flags.load_teacher)}")
    family = checkpoint.form.family(checkpoint.folder)
    if family != student.family:
        raise ConfigError(
            f"{shown} is of the family {family}, and the student of {student.family}: they have "
            "different inputs; name a teacher of the student's family"
        )
    source = checkpoint.open(verify=False)
    source.require_model()
    _compare(flags, source.model, shown)
    model, notes = _fitted(source.model, config, token_count, shown)
    _check_layout(model, config.parallel, shown)
    parallel = config.parallel
    if parallel.pipeline_partition not in ("blocks", "parameters"):
        parallel = dataclasses.replace(parallel, pipeline_partition="blocks")
    # Values per block are those of the student's blocks; the teacher uses only the first.
    parallel = dataclasses.replace(parallel, cp_comm_type=parallel.cp_comm_type[:1])
    partitions = config.engine.zero_stage == 3
    compiling = "off" if partitions else config.fast_paths.torch_compile
    trained = (type(section)() for section in config.sections if section.trains)
    config = dataclasses.replace(
        config.with_sections(*trained, DistillationConfig()),
        model=model,
        parallel=parallel,
        checkpoint=CheckpointConfig(load=flags.load_teacher),
        # The defaults: training dtype, and no CUDA graphs, which would share the student's memory.
        fast_paths=FastPathsConfig(torch_compile=compiling),
        engine=dataclasses.replace(config.engine, zero_stage=min(1, config.engine.zero_stage)),
    )
    return FoundTeacher(checkpoint, config, partitions, notes)


def _compare(flags: DistillationConfig, model: ModelConfig, shown: str) -> None:
    """Raise ConfigError if flags contradict the teacher's checkpoint."""
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
    numbers = flags.num_experts_teacher
    layers = _layer_experts(model)
    alike = len({*numbers}) == 1 and {*numbers} == set(layers or (1,))
    if numbers not in ((), layers) and not alike:
        raise ConfigError(
            f"--num-experts-teacher {' '.join(map(str, numbers))}: the teacher of {shown} "
            + (f"has {' '.join(map(str, layers))}" if layers else "is dense")
            + "; give that, or leave the flag out"
        )


def _layer_experts(model: ModelConfig) -> tuple[int, ...]:
    """Return the number of experts of each layer that has experts. The field belongs to another
    feature, which may be missing."""
    return tuple(filter(None, getattr(model.flags(), "layer_experts", ())))


def _fitted(
    model: ModelConfig, config: RunConfig, token_count: int | None, shown: str
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the teacher's configuration, with the student's sequence length and vocabulary
    sharding, and notes to print."""
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
    """Raise ConfigError if the student's layout cannot shard the teacher."""
    ranks, stages = parallel.tensor_model_parallel_size, parallel.stages
    heads, groups = model.attention.num_attention_heads, model.attention.num_query_groups
    inner = getattr(model.flags(), "moe_ffn_hidden_size", None) or 0
    whole = parallel.experts_over_tensor != "cut"
    for what, count, fits in (
        ("attention heads", heads, heads % ranks == 0),
        ("key-value heads", groups, groups % ranks == 0 or ranks % groups == 0),
        ("features of an MLP", model.mlp.ffn_hidden_size, model.mlp.ffn_hidden_size % ranks == 0),
        ("features of an expert", inner, whole or inner % ranks == 0),
    ):
        if not fits:
            raise ConfigError(
                f"{shown} has {count} {what}, which --tensor-model-parallel-size {ranks} cannot "
                "share; choose a size that divides the teacher's numbers too"
            )
    experts = parallel.expert_model_parallel_size
    for count in _layer_experts(model):
        if count % experts:
            raise ConfigError(
                f"{shown} has a layer of {count} experts, which --expert-model-parallel-size "
                f"{experts} cannot divide; choose a size that divides the teacher's experts too"
            )
    if model.blocks < stages:
        raise ConfigError(
            f"{shown} has {model.blocks} layers, fewer than the {stages} stages of the pipeline; "
            "choose a smaller --pipeline-model-parallel-size"
        )


class Teacher:
    """Loaded teacher, which computes its outputs for the student's micro batches."""

    def __init__(self, engine: Evaluator) -> None:
        self.engine = engine

    def teach(self, batches: Iterator[Any], count: int) -> Iterator[TaughtBatch]:
        """Yield ``count`` micro batches with the teacher's hidden states. In a pipeline the teacher
        runs on all of them first; otherwise it runs on each when that is requested."""
        rounds = [count] if self.engine.mesh.pipeline.size > 1 else [1] * count
        for size in rounds:
            device = self.engine.device
            own = [next(batches).to(device, non_blocking=True) for _ in range(size)]
            heads: list[TeacherHead | None] = list(self.heads(own))
            for batch, head in zip(own, heads or [None] * size, strict=True):
                yield TaughtBatch(batch, head)

    def heads(self, batches: list[Any]) -> list[TeacherHead]:
        """Return the teacher's output head with its input, for every micro batch. The list is empty
        on pipeline stages without the head."""
        measure = _HeadInputs()
        with torch.no_grad():
            self.engine.prepare_evaluation()
            hidden = self.engine.backend.evaluate(iter(batches), len(batches), measure)
        if not hidden:
            return []
        assert measure.taken is not None
        _, weight_VH, bias_V, _, head = measure.taken
        return [TeacherHead(x_BPH, weight_VH, bias_V, head) for x_BPH in hidden]


@dataclass(frozen=True)
class _HeadInputs(Measure):
    """Measure that returns the input of the head [B, P, H] and computes no logits."""

    names: tuple[str, ...] = ()
    take: Any = None
    kept: list[HeadInput] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def taken(self) -> HeadInput | None:
        """Most recent input of the head, or None before the first run."""
        return self.kept[-1] if self.kept else None

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        self.kept[:] = [inputs]
        return {}

    def start(self, begin: LayerState) -> LayerState:
        return begin.changed(objective=self)

    def of(self, state: LayerState, batch: Any) -> Tensor:
        return self.kept[-1].x_BPH


IDENTITY = "teacher.json"
BLOCK_BYTES = 64 * 2**20
"""Approximate size of a cache file in bytes."""
_DIGESTED = 8
"""Number of a teacher's smallest tensors, such as norms, whose values enter its identity."""


class Sampled(NamedTuple):
    """Dataset, and indices of its samples whose losses need the teacher."""

    dataset: SampleDataset[Any]
    numbers: range


class _Place(NamedTuple):
    file: Path
    start: int
    stop: int


class TeacherCache:
    """Outputs of one teacher in the folder ``--kd-cache``. Raises ConfigError if the folder belongs
    to another teacher or temperature, and CheckpointError if a file is damaged."""

    def __init__(self, folder: str, identity: Mapping[str, Any], collate: Any) -> None:
        self._folder, self._identity, self._collate = Path(folder), dict(identity), collate
        self._open: dict[Path, Any] = {}
        self._places: dict[int, _Place] = {}
        path = self._folder / IDENTITY
        if path.is_file():
            self._compare(path)
        self.look()

    def _compare(self, path: Path) -> None:
        try:
            written = parse_json(path.read_bytes(), str(path))
        except ValueError as error:
            raise CheckpointError(f"{error}; remove --kd-cache {self._folder}") from None
        for name, value in self._identity.items():
            # Folders of earlier versions have no digest of the teacher's files.
            if written.get(name) != value and not (name == "files" and name not in written):
                raise ConfigError(
                    f"--kd-cache {self._folder} is of another teacher: {name} is "
                    f"{written.get(name)}, and here {value}; name another folder"
                )

    def look(self) -> None:
        """Open all new files in the folder, and record their samples."""
        for path in sorted(self._folder.glob("*.safetensors")):
            if path in self._open:
                continue
            try:
                self._open[path] = file = safe_open(path, "pt")
                keys, stops = file.get_tensor("keys").tolist(), file.get_tensor("stops").tolist()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: {error}; remove the file") from None
            for key, start, stop in zip(keys, [0, *stops[:-1]], stops, strict=True):
                self._places[key] = _Place(path, start, stop)

    def missing(self, samples: Iterable[Sampled], mesh: Mesh) -> list[Any]:
        """Return the samples that the cache lacks, each once. The same on every rank."""
        seen, missing = mesh.world.shared(set(self._places)), []
        for dataset, numbers in samples:
            for number in numbers:
                sample = dataset[number]
                (key,) = self._collate([sample]).keys_B.tolist()
                if key not in seen:
                    seen.add(key)
                    missing.append(sample)
        return missing

    def fill(self, teacher: Teacher, samples: Sequence[Any], micro_batch_size: int) -> None:
        """Compute and store the outputs for ``samples``, divided over data-parallel ranks.
        Collective: every rank must call this."""
        mesh, count = teacher.engine.mesh, int(self._identity["tokens"])
        temperature = float(self._identity["temperature"])
        if mesh.world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / IDENTITY
            write_whole(path, json.dumps(self._identity, indent=1).encode())
        own = samples[mesh.samples.rank :: mesh.samples.size]
        # The ranks of an expert-parallel teacher exchange tokens in every batch: all of them must
        # compute as many, so some compute a sample of another rank again.
        own = [*own, *samples[: -(-len(samples) // mesh.samples.size) - len(own)]]
        at_once = micro_batch_size * (2 * mesh.pipeline.size if mesh.pipeline.size > 1 else 1)
        block = _Block()
        bar = progress_bar("teacher", total=len(own), unit=" samples")
        with bar:
            for first in range(0, len(own), at_once):
                group = own[first : first + at_once]
                parts = range(0, len(group), micro_batch_size)
                batches = [self._collate(group[at : at + micro_batch_size]) for at in parts]
                # In a pipeline all micro batches must have the same shape.
                lengths = [batch.tokens_BS.shape[1] for batch in batches]
                size = len(batches[0].tokens_BS)
                if mesh.pipeline.size > 1:
                    batches = [_repeated(b.lengthened(max(lengths)), size) for b in batches]
                moved = [batch.to(teacher.engine.device) for batch in batches]
                for batch, head in zip(batches, teacher.heads(moved), strict=False):
                    top = linear_top_tokens(head, count, temperature)
                    if mesh.tensor.rank == mesh.group("context").rank == 0:
                        block.add(batch, TopTokens(*(each.cpu() for each in top)))
                        if block.bytes >= BLOCK_BYTES:
                            block.write(self._folder)
                bar.update(len(group))
        block.write(self._folder)
        if mesh.world.size > 1:
            dist.barrier(group=mesh.world.handle)
        self.look()

    def teach(self, batches: Iterator[Any], count: int, has_head: bool) -> Iterator[TaughtBatch]:
        """Yield ``count`` micro batches with the teacher's cached outputs. Without ``has_head``, on
        other pipeline stages, they have none."""
        for _ in range(count):
            batch = next(batches)
            if not has_head:
                yield TaughtBatch(batch)
                continue
            device, length = batch.tokens_BS.device, batch.tokens_BS.shape[1]
            rows = [self._of(key, length) for key in batch.keys_B.tolist()]
            parts = (torch.stack(part).to(device) for part in zip(*rows, strict=True))
            yield TaughtBatch(batch, TopTokens(*parts))

    def _of(self, key: int, length: int) -> tuple[Tensor, ...]:
        """Return the outputs for the sample ``key``, cut or padded with zeros to ``length``."""
        place = self._places.get(key)
        if place is None:
            raise CheckpointError(
                f"--kd-cache {self._folder} lacks a sample of this run, which it had at its start"
            )
        stop = min(place.stop, place.start + length)
        file = self._open[place.file]
        slices = [file.get_slice(name)[place.start : stop] for name in TopTokens._fields]
        missing = length - (stop - place.start)
        return tuple(F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) for each in slices)


class _Block:
    """Teacher's outputs for samples that have not been written to a file yet."""

    def __init__(self) -> None:
        self._found: dict[int, TopTokens] = {}
        self.bytes = 0

    def add(self, batch: Any, top: TopTokens) -> None:
        for row, key in enumerate(batch.keys_B.tolist()):
            own = TopTokens(*(each[row] for each in top))
            if key not in self._found:
                self._found[key] = own
                self.bytes += sum(each.nbytes for each in own)

    def write(self, folder: Path) -> None:
        """Write the outputs to a new file in the folder, atomically, and clear the block."""
        if not self._found:
            return
        keys, rows = list(self._found), self._found.values()
        stops = torch.tensor([len(top.rest_BP) for top in rows]).cumsum(0)
        tensors = {"keys": torch.tensor(keys), "stops": stops} | {
            name: torch.cat([top[field] for top in rows])
            for field, name in enumerate(TopTokens._fields)
        }
        name = f"{digest_of_parts(f'{key} ' for key in keys)}.safetensors"
        with replacing(folder / name) as path:
            save_tensors(tensors, path)
        self.__init__()  # type: ignore[misc]


def _repeated(batch: Any, size: int) -> Any:
    """Return the batch extended to ``size`` samples with copies of its last one."""
    missing = size - len(batch.tokens_BS)
    if not missing:
        return batch
    repeat = torch.arange(size).clamp(max=size - missing - 1)
    parts = batch._replace(weights_2=None)
    return batch._make(None if each is None else each[repeat] for each in parts)


def identity_of(source: Source, top_tokens: int, temperature: float) -> dict[str, Any]:
    """Return the identity of a teacher for its cache folder. It has digests of the smallest weights
    and of blocks of the checkpoint's files; the latter distinguish teachers with equal norms."""
    shapes = {name: source.shape(name) for name in source.names()}
    smallest = sorted(shapes, key=lambda name: (torch.Size(shapes[name]).numel(), name))
    read = (source.tensor(name).contiguous().numpy().data for name in smallest[:_DIGESTED])
    weights = digest_of_parts([json.dumps(sorted(shapes.items())), *read])
    identity = {"weights": weights, "tokens": top_tokens, "temperature": temperature}
    return identity | {"files": checkpoint_digest(source.folder)}
