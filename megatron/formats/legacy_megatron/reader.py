"""Reader of old Megatron checkpoints, with any tensor-parallel and pipeline-parallel size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig, ModelFlags, Vocabulary
from megatron.formats.features import whole_shards
from megatron.formats.legacy_megatron.arguments import (
    DescribedSource,
    complete,
    divided_sizes,
    end_of_text,
    model_of_arguments,
    tokenizer_of_arguments,
    unpadded_vocabulary,
)
from megatron.formats.legacy_megatron.experts import (
    is_of_experts,
    join_expert,
    of_one_expert,
    one_expert,
    require_experts,
)
from megatron.formats.legacy_megatron.names import (
    BIASES,
    HEAD_COPY,
    FamilyNames,
    family_of_names,
    is_embedding_copy,
    kv_from_megatron,
    qkv_from_megatron,
    rename,
    stack_of,
)
from megatron.formats.legacy_megatron.rank_files import (
    Key,
    Rank,
    RankFile,
    UnusableError,
    adam_state,
    find_megatron,
    layout_of,
    rank_files,
    require_ranks,
)

_EMBEDDING = "embedding.word_embeddings.weight"
_PUBLISHED_HEAD_DIM = 64
"""Head width of every model that NVIDIA published in this format without arguments."""


class ParameterLocation(NamedTuple):
    """Location of a parameter in the files, and the shape and dtype of a tensor-parallel rank's
    shard."""

    pipeline: int
    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype


class MegatronCheckpoint(DescribedSource):
    """A checkpoint of Megatron-LM from before its core library (versions 0 to 3). It can be a
    folder ``iter_0000100`` or ``release``, such a folder in a zip archive, or the file of a single
    rank. ``described`` is the network for a file without arguments. ``vocabulary_is_guessed`` is
    True if the checkpoint does not specify how many rows of the token embedding are padding.

    Only the files of one pipeline rank are open at a time. Raises CheckpointError if a file is
    missing, damaged or does not fit the others, or if the network cannot be represented.
    """

    title = "checkpoint of Megatron-LM"

    def __init__(self, folder: Path, described: ModelConfig | None = None) -> None:
        super().__init__(folder)
        self.notes: list[str] = []
        self._described = described
        self._files = rank_files(folder)
        self._open: tuple[int, list[RankFile]] | None = None
        self._moments: dict[tuple[int, int], dict[Key, dict[str, Tensor]]] = {}
        first = self._stage(0)[0]
        self.version, self._arguments = first.version, first.arguments
        self.iteration = first.iteration or None
        self._sizes(first.path)
        self._open = None  # reopen the files, which the arguments may have assigned to other ranks
        last = self._stage(self.pipeline_size - 1)[0].chunks[-1]
        self._names = family_of_names(last)
        self._locations, self._layers = _survey(self._stage, self.pipeline_size, self._names)
        self.model = self._model(first.path)
        self._shards = whole_shards(self.model)
        if self.model.embedding.tied and self.pipeline_size > 1:
            # The core library uses this name for the last stage's copy of the embedding.
            self._locations.pop("output_layer.weight", None)
        self._check_parameters(first.path)
        self.tokenizer = tokenizer_of_arguments(self._arguments)
        self.end_of_text = end_of_text(self._arguments, self.model.vocabulary.size)
        self._find_optimizer()

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        return find_megatron(path, wanted)

    @classmethod
    def family(cls, folder: Path) -> str:
        last = list(rank_files(folder).values())[-1]
        return family_of_names(RankFile.open(last).chunks[-1]).family

    def dtype(self, name: str, kind: str = "weight") -> str:
        master = self.has_moments or kind != "weight"
        place = one_expert(name, 0) if is_of_experts(name) else name
        return "float32" if master else str(self._locations[place].dtype).removeprefix("torch.")

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        shard = self._shard(name)
        if is_of_experts(name):
            return self._experts(name, kind)
        files = self._stage(self._locations[name].pipeline)
        shares = [
            self._canonical(name, values, files[0].path) for values in self._shares(name, kind, 0)
        ]
        return shard.join(shares, {"tensor": len(shares)})

    def _shares(self, name: str, kind: str, expert_rank: int) -> list[Tensor]:
        """Return the tensor-parallel ranks' shards of a parameter, read from one expert rank's
        files. For an expert, ``name`` contains its index on that rank."""
        location, shares = self._locations[name], []
        for number, file in enumerate(self._stage(location.pipeline)):
            if number % self.expert_size != expert_rank:
                continue
            chunk, theirs = location.key
            share = file.chunks[chunk][theirs]
            if self.has_moments:
                share = self._state(number, file)[location.key].get(kind, share)
            elif kind != "weight":
                raise CheckpointError(f"{self.folder} has no {kind} of {name}")
            shares.append(share.to(torch.float32))
        return shares

    def _experts(self, name: str, kind: str) -> Tensor:
        """Return a parameter that stacks all experts. Each tensor rank's files have a shard of each
        expert."""
        experts, *shape = self.shape(name)
        here, gated, parts = experts // self.expert_size, self.model.mlp.gated, []
        for number in range(experts):
            shares = self._shares(one_expert(name, number % here), kind, number // here)
            parts.append(join_expert(shares, name, shape, gated))
        return torch.stack(parts)

    def set_vocabulary(self, size: int) -> None:
        """Set the number of token embedding rows that are not padding, if the checkpoint does not
        specify it."""
        assert self.vocabulary_is_guessed and 0 < size <= self.model.vocabulary.padded
        self.model = dataclasses.replace(
            self.model, vocabulary=Vocabulary(size, self.model.vocabulary.padded)
        )
        self._shards = whole_shards(self.model)

    def _stage(self, pipeline: int) -> list[RankFile]:
        if self._open is None or self._open[0] != pipeline:
            self._open, self._moments = None, {}  # free the memory of the previous files first
            paths = [path for rank, path in self._files.items() if rank.pipeline == pipeline]
            self._open = pipeline, [RankFile.open(path) for path in paths]
        return self._open[1]

    def _sizes(self, path: Path) -> None:
        """Set the sizes of the parallel layout that wrote the checkpoint, from its arguments or
        else from the folder. Raises CheckpointError if the files do not match them."""
        tensor = self._argument("tensor_model_parallel_size", self._argument("model_parallel_size"))
        pipeline = self._argument("pipeline_model_parallel_size")
        experts = self._argument("expert_model_parallel_size")
        layout = layout_of(self._files)
        if pipeline == 1 and (experts or 1) > 1 and layout.expert == 1:
            files = {Rank(0, r.tensor, r.pipeline): file for r, file in self._files.items()}
            self._files = dict(sorted(files.items()))
            layout = layout_of(self._files)
        sizes = Rank(pipeline or layout.pipeline, tensor or layout.tensor, experts or layout.expert)
        self.pipeline_size, self.tensor_size, self.expert_size = sizes
        if layout != sizes:
            if self.folder.is_file():
                raise CheckpointError(
                    f"{path} is the file of one of {math.prod(sizes)} ranks: leave it in its "
                    "folder (mp_rank_00) next to those of the others"
                )
            require_ranks(self._files, self.folder, sizes)
            raise CheckpointError(
                f"{self.folder} has files of {_shown(layout)} ranks; {path} was written by "
                f"{_shown(sizes)}"
            )

    def _argument(self, name: str, default: int | None = None) -> int | None:
        value = self._arguments.get(name)
        return value if isinstance(value, int) and value > 0 else default

    def _model(self, path: Path) -> ModelConfig:
        """Return the network, after checking it against the shapes of parameters."""
        embedding = self._locations.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{path} has no language_model.embedding.word_embeddings.weight")
        rows = embedding.shape[0] * self.tensor_size
        family = self._names.family
        if self._arguments:
            model = model_of_arguments(self._arguments, path, family)
        elif self._described is not None:
            model = self._described
        else:
            model = self._published(path, embedding.shape[1])
        if model.family != family:
            raise CheckpointError(f"{path} has a model of the family {family}, not {model.family}")
        for stack, (_, argument, length, _) in self._names.stacks.items():
            if length(model) != self._layers[stack]:
                raise CheckpointError(
                    f"{path}: the argument {argument} is {length(model)}, but the files have "
                    f"{self._layers[stack]} blocks"
                )
        types = self._locations.get("embedding.tokentype_embeddings.weight")
        if types is not None and types.shape[0] != model.token_types:
            model = dataclasses.replace(model, num_tokentypes=types.shape[0])
        for name, fields in self._names.heads.items():
            if name in self._locations:
                shown = fields(self._locations[name].shape[0])
                model = dataclasses.replace(model, **shown)
        size = unpadded_vocabulary(self._arguments, rows)
        if self._described is not None and not self._arguments:
            size = min(self._described.vocabulary.size, rows)
        self.vocabulary_is_guessed = size is None
        if size is None:
            self.notes.append(
                f"the token embedding has {rows:,} rows, and the checkpoint does not say how many "
                "are padding: all count as tokens"
            )
        return dataclasses.replace(model, vocabulary=Vocabulary(size or rows, rows))

    def _published(self, path: Path, hidden: int) -> ModelConfig:
        """Return a network that was released without arguments. Everything but the head width is
        derived from shapes."""
        positions = self._locations.get("embedding.position_embeddings.weight")
        up = self._locations.get("layers.0.mlp.up.weight")
        if positions is None or up is None or hidden % _PUBLISHED_HEAD_DIM:
            raise CheckpointError(f"{path} has no args, and is not a published GPT-2 or BERT")
        heads = hidden // _PUBLISHED_HEAD_DIM
        self.notes.append(
            f"the checkpoint has no arguments: {heads} heads of {_PUBLISHED_HEAD_DIM}, GELU by "
            "tanh, as NVIDIA's published models have"
        )
        flags = ModelFlags(
            family=self._names.family,
            num_layers=self._layers["encoder"],
            hidden_size=hidden,
            ffn_hidden_size=up.shape[0] * self.tensor_size,
            num_attention_heads=heads,
            max_position_embeddings=positions.shape[0],
            untie_embeddings_and_output_weights="output_layer.weight" in self._locations,
            **self._names.seen(self._locations),
        )
        return complete(flags, path)

    def _check_parameters(self, path: Path) -> None:
        """Raise CheckpointError if the parameters in the files are not those that the arguments
        describe."""
        theirs = [location.key[1] for location in self._locations.values()]
        before_core = any(
            n.startswith("language_model.") and ".local_experts." in n for n in theirs
        )
        if before_core and not self._arguments.get("num_experts_switch"):
            raise CheckpointError(
                f"{path}: the experts of Megatron-LM before its core library are weighed by a "
                "sigmoid and chosen by another rule in training, which cannot be represented"
            )
        numbers: dict[str, list[int]] = {}
        for each in self._locations:
            name, number = of_one_expert(each)
            numbers.setdefault(name, []).append(number)
        for what, size in divided_sizes(self.model).items():
            if size % self.tensor_size:
                raise CheckpointError(
                    f"{path}: {self.tensor_size} tensor ranks do not divide {what} {size}"
                )
        for name, shard in self._shards.items():
            if is_of_experts(name):
                self._check_experts(name, numbers.get(name, ()), path)
                continue
            location = self._locations.get(name)
            if location is None:
                raise CheckpointError(
                    f"{path}: the arguments describe a network with {name}, which no file has"
                )
            shape = shard.local_shape({"tensor": (0, self.tensor_size)})
            if location.shape != shape:
                raise CheckpointError(
                    f"{self._files[Rank(location.pipeline, 0)]}: {location.key[1]} has the shape "
                    f"{location.shape}; by the arguments it is {shape} (num_attention_heads, "
                    "kv_channels, ffn_hidden_size, swiglu, padded vocabulary)"
                )
        for name, location in self._locations.items():
            if of_one_expert(name)[0] not in self._shards:
                raise CheckpointError(
                    f"{self._files[Rank(location.pipeline, 0)]}: {location.key[1]} is not part of "
                    "the network that the arguments describe"
                )

    def _check_experts(self, name: str, numbers: Collection[int], path: Path) -> None:
        experts = self.shape(name)[0]
        if experts % self.expert_size:
            raise CheckpointError(
                f"{path}: {self.expert_size} expert ranks do not divide the {experts} experts of "
                f"{name}"
            )
        # Each expert rank numbers its experts from 0.
        require_experts(numbers, experts // self.expert_size, name, path)

    def _find_optimizer(self) -> None:
        """Set ``has_moments`` and the counters in ``state``, if the optimizer state can be used."""
        self.has_moments = False
        try:
            files = (f for p in range(self.pipeline_size) for f in self._stage(p))
            steps = {adam_state(file.optimizer, file.chunks)[1] for file in files}
            consumed = self._arguments.get("consumed_train_samples")
            if len(steps) != 1:
                raise UnusableError(f"its ranks have done different numbers of steps, {steps}")
            if self.iteration is None or not isinstance(consumed, int):
                raise UnusableError("it does not say how many steps and samples were done")
        except UnusableError as reason:
            self._moments = {}
            self.notes.append(f"weights only: {reason}")
            return
        self.has_moments = True
        self.state = {
            "iteration": self.iteration,
            "consumed_samples": consumed,
            "optimizer_step": steps.pop(),
            "loss_scaler": {},
        }

    def _state(self, number: int, file: RankFile) -> dict[Key, dict[str, Tensor]]:
        assert self._open is not None
        key = self._open[0], number
        if key not in self._moments:
            self._moments[key] = adam_state(file.optimizer, file.chunks)[0]
        return self._moments[key]

    def _canonical(self, name: str, share: Tensor, path: Path) -> Tensor:
        """Return a rank's shard with its rows in the canonical order."""
        attention, size = self.model.attention, self.tensor_size
        heads, groups = attention.num_attention_heads // size, attention.num_query_groups // size
        width = attention.kv_channels
        try:
            if ".attention.qkv." in name:
                return qkv_from_megatron(share, self.version, heads, groups, width)
            if ".cross_attention.kv." in name:
                return kv_from_megatron(share, self.version, groups, width)
            return share
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None


def _shown(sizes: Rank) -> str:
    words = f"{sizes.tensor} tensor and {sizes.pipeline} pipeline"
    return words if sizes.expert == 1 else f"{words} and {sizes.expert} expert"


class _Stage(NamedTuple):
    """Facts that the files of a pipeline rank share: version, iteration, and the shape and dtype of
    each parameter by Megatron's name. ``path`` is the file of the first tensor rank."""

    path: Path
    version: float
    iteration: int | None
    chunks: Sequence[Mapping[str, tuple[tuple[int, ...], torch.dtype]]]


def _survey(
    stage: Callable[[int], Sequence[RankFile]], pipeline_size: int, names: FamilyNames
) -> tuple[dict[str, ParameterLocation], Mapping[str, int]]:
    """Return the location of each parameter by canonical name, and the number of blocks in each
    stack. ``stage`` returns the files of a pipeline rank. Raises CheckpointError if files belong to
    different checkpoints, blocks are missing, or a parameter is unknown."""
    stages: list[_Stage] = []
    for pipeline in range(pipeline_size):
        stages.append(_common(stage(pipeline)))
        _check_together(stages[0], stages[-1])
    locations: dict[str, ParameterLocation] = {}
    done = dict.fromkeys(names.stacks, 0)
    # Blocks are numbered by chunk first: chunk 0 of rank 0, of rank 1, ..., then chunk 1 of rank 0.
    for chunk in range(len(stages[0].chunks)):
        for pipeline, each in enumerate(stages):
            path, layers = each.path, {stack: set[int]() for stack in names.stacks}
            for theirs, (shape, dtype) in each.chunks[chunk].items():
                if theirs == HEAD_COPY or (pipeline and is_embedding_copy(theirs, names)):
                    continue
                stack, number = stack_of(theirs) or ("", 0)
                ours = rename(theirs, done.get(stack, 0), names)
                if ours is None:
                    raise CheckpointError(f"{path}: {theirs} is not a known parameter")
                if ours in locations:
                    raise CheckpointError(f"{path}: {theirs} is there twice, as {ours}")
                locations[ours] = ParameterLocation(pipeline, (chunk, theirs), shape, dtype)
                if stack:
                    layers[stack].add(number)
            for stack, numbers in layers.items():
                if numbers != set(range(len(numbers))):
                    raise CheckpointError(f"{path} has blocks {sorted(numbers)}, some are missing")
                done[stack] += len(numbers)
    tied_bias, own_bias = BIASES
    if "output_layer.weight" in locations and tied_bias in locations:
        locations[own_bias] = locations.pop(tied_bias)
    return locations, done


def _stage_of(file: RankFile) -> _Stage:
    chunks = [{name: (tuple(v.shape), v.dtype) for name, v in c.items()} for c in file.chunks]
    return _Stage(file.path, file.version, file.iteration, chunks)


def _common(files: Sequence[RankFile]) -> _Stage:
    stages = list(map(_stage_of, files))
    for stage in stages:
        _check_together(stages[0], stage)
        for wanted, chunk in zip(stages[0].chunks, stage.chunks, strict=True):
            for name in [*wanted, *chunk]:
                if wanted.get(name) != chunk.get(name):
                    raise CheckpointError(
                        f"{stage.path} has other parameters than {files[0].path}: {name} is "
                        f"{chunk.get(name, 'missing')}, not {wanted.get(name, 'there')}"
                    )
    return stages[0]


def _check_together(here: _Stage, there: _Stage) -> None:
    for what in ("version", "iteration"):
        wanted, there_value = getattr(here, what), getattr(there, what)
        if wanted != there_value:
            raise CheckpointError(
                f"{there.path} is of {what} {there_value}, {here.path} of {wanted}: they are "
                "not of one checkpoint"
            )
    if len(here.chunks) != len(there.chunks):
        raise CheckpointError(
            f"{there.path} has {len(there.chunks)} model chunks, {here.path} has {len(here.chunks)}"
        )
