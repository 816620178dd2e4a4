"""Reads old Megatron checkpoints, of any tensor and pipeline size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig, ModelFlags, Vocabulary
from megatron.formats.legacy_megatron.arguments import (
    complete,
    divided_sizes,
    model_of_arguments,
    tokenizer_of_arguments,
    unpadded_vocabulary,
)
from megatron.formats.legacy_megatron.locations import (
    Rank,
    find_megatron,
    rank_files,
    require_ranks,
)
from megatron.formats.legacy_megatron.names import qkv_from_megatron
from megatron.formats.legacy_megatron.optimizer import MOMENTS, Key, UnusableError, adam_state
from megatron.formats.legacy_megatron.rank_file import RankFile
from megatron.formats.legacy_megatron.shards import shards_of
from megatron.formats.legacy_megatron.survey import survey

_TABLE = "embedding.word_embeddings.weight"
_PUBLISHED_HEAD_DIM = 64
"""Width of a head in every model that NVIDIA published in this form without arguments."""


class MegatronCheckpoint(Source):
    """A checkpoint of Megatron-LM before its core library (versions 0 to 3).

    Files of one pipeline rank are open at a time.

    Args:
        folder: ``iter_0000100``, ``release``, or such a folder within a zip archive.

    Attributes:
        version: its ``checkpoint_version``.
        iteration: steps done; None where it does not say (released models).
        tensor_size, pipeline_size: layout that wrote it.
        vocabulary_is_guessed: whether all rows of the token table are taken for tokens because the
            checkpoint does not say how many are padding.

    Raises:
        CheckpointError: a file is missing, damaged, does not fit the others, or describes a network
            that is not ours.
    """

    title = "checkpoint of Megatron-LM"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.notes: list[str] = []
        self._files = rank_files(folder)
        self._open: tuple[int, list[RankFile]] | None = None
        self._moments: dict[tuple[int, int], dict[Key, dict[str, Tensor]]] = {}
        first = self._stage(0)[0]
        self.version, self._arguments = first.version, first.arguments
        self.iteration = first.iteration or None
        self._sizes(first.path)
        self._places, self._layers = survey(self._stage, self.pipeline_size)
        self.model = self._model(first.path)
        self._shards = shards_of(self.model, self._places)
        self._check_parameters(first.path)
        self.tokenizer = tokenizer_of_arguments(self._arguments)
        self._find_optimizer()

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """See :meth:`Source.locate`."""
        return find_megatron(path, wanted)

    def names(self) -> Sequence[str]:
        """See :meth:`Source.names`."""
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :meth:`Source.shape`."""
        return self._shard(name).canonical_shape

    def kinds(self, name: str) -> Sequence[str]:
        """See :meth:`Source.kinds`."""
        self._shard(name)
        return ("weight", *MOMENTS) if self._has_moments else ("weight",)

    def dtype(self, name: str, kind: str = "weight") -> str:
        """See :meth:`Source.dtype`."""
        place = self._places[name]
        master = self._has_moments or kind != "weight"
        return "float32" if master else str(place.dtype).removeprefix("torch.")

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """See :meth:`Source.tensor`."""
        shard, place = self._shard(name), self._places[name]
        shares = []
        for number, file in enumerate(self._stage(place.pipeline)):
            chunk, theirs = place.key
            share = file.chunks[chunk][theirs]
            if self._has_moments:
                stored = self._state(number, file)[place.key]
                share = stored.get(kind, share)
            elif kind != "weight":
                raise CheckpointError(f"{self.folder} has no {kind} of {name}")
            shares.append(self._canonical(name, share.to(torch.float32), file.path))
        return shard.join(shares, {"tensor": len(shares)})

    def set_vocabulary(self, size: int) -> None:
        """Says how many rows of the token table are tokens, where the checkpoint does not."""
        assert self.vocabulary_is_guessed and 0 < size <= self.model.vocabulary.padded
        self.model = dataclasses.replace(
            self.model, vocabulary=Vocabulary(size, self.model.vocabulary.padded)
        )
        self._shards = shards_of(self.model, self._places)

    def _shard(self, name: str) -> Any:
        if name not in self._shards:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return self._shards[name]

    def _stage(self, pipeline: int) -> list[RankFile]:
        """The files of a pipeline rank, by tensor rank."""
        if self._open is None or self._open[0] != pipeline:
            self._open, self._moments = None, {}  # before the next ones take memory
            paths = [path for rank, path in self._files.items() if rank.pipeline == pipeline]
            self._open = pipeline, [RankFile.open(path) for path in paths]
        return self._open[1]

    def _sizes(self, path: Path) -> None:
        """The layout that wrote it, which the arguments can know better than the folder shows."""
        tensor = self._argument("tensor_model_parallel_size", self._argument("model_parallel_size"))
        pipeline = self._argument("pipeline_model_parallel_size")
        found = max(rank.tensor for rank in self._files) + 1
        stages = max(rank.pipeline for rank in self._files) + 1
        self.tensor_size, self.pipeline_size = tensor or found, pipeline or stages
        if (found, stages) != (self.tensor_size, self.pipeline_size):
            require_ranks(self._files, self.folder, self.tensor_size, self.pipeline_size)
            raise CheckpointError(
                f"{self.folder} has files of {found} tensor and {stages} pipeline ranks; {path} "
                f"was written by {self.tensor_size} and {self.pipeline_size}"
            )

    def _argument(self, name: str, default: int | None = None) -> int | None:
        value = self._arguments.get(name)
        return value if isinstance(value, int) and value > 0 else default

    def _model(self, path: Path) -> ModelConfig:
        """The network, checked against the parameters' shapes."""
        if _TABLE not in self._places or len(self._places[_TABLE].shape) != 2:
            raise CheckpointError(f"{path} has no language_model.embedding.word_embeddings.weight")
        rows = self._places[_TABLE].shape[0] * self.tensor_size
        model = self._described(path)
        if model.num_layers != self._layers:
            raise CheckpointError(
                f"{path}: the argument num_layers is {model.num_layers}, but the files hold "
                f"{self._layers} blocks"
            )
        size = unpadded_vocabulary(self._arguments, rows)
        self.vocabulary_is_guessed = size is None
        if size is None:
            self.notes.append(
                f"the token embedding has {rows:,} rows, and the checkpoint does not say how many "
                "are padding: all count as tokens"
            )
        return dataclasses.replace(model, vocabulary=Vocabulary(size or rows, rows))

    def _described(self, path: Path) -> ModelConfig:
        if self._arguments:
            return model_of_arguments(self._arguments, path)
        # Released without arguments: the shapes say all but the width of a head.
        hidden = self._places[_TABLE].shape[1]
        positions = self._places.get("embedding.position_embeddings.weight")
        up = self._places.get("layers.0.mlp.up.weight")
        if positions is None or up is None or hidden % _PUBLISHED_HEAD_DIM:
            raise CheckpointError(f"{path} has no args, and is no published GPT-2 or BERT")
        heads = hidden // _PUBLISHED_HEAD_DIM
        self.notes.append(
            f"the checkpoint has no arguments: {heads} heads of {_PUBLISHED_HEAD_DIM}, GELU by "
            "tanh, as NVIDIA's published models have"
        )
        return complete(
            ModelFlags(
                num_layers=self._layers,
                hidden_size=hidden,
                ffn_hidden_size=up.shape[0] * self.tensor_size,
                num_attention_heads=heads,
                max_position_embeddings=positions.shape[0],
                untie_embeddings_and_output_weights="output_layer.weight" in self._places,
            ),
            path,
        )

    def _check_parameters(self, path: Path) -> None:
        """Compares the parameters with those that the arguments describe."""
        for what, size in divided_sizes(self.model).items():
            if size % self.tensor_size:
                raise CheckpointError(
                    f"{path}: {self.tensor_size} tensor ranks do not divide {what} {size}"
                )
        for name, shard in self._shards.items():
            place = self._places.get(name)
            if place is None:
                raise CheckpointError(
                    f"{path}: the arguments describe a network with {name}, which no file has"
                )
            file = self._files[Rank(place.pipeline, 0)]
            shape = shard.local_shape({"tensor": (0, self.tensor_size)})
            if place.shape != shape:
                raise CheckpointError(
                    f"{file}: {place.key[1]} has the shape {place.shape}; after the arguments it "
                    f"is {shape} (num_attention_heads, kv_channels, "
                    "ffn_hidden_size, swiglu, padded vocabulary)"
                )
        surplus = [name for name in self._places if name not in self._shards]
        if surplus:
            place = self._places[surplus[0]]
            raise CheckpointError(
                f"{self._files[Rank(place.pipeline, 0)]}: {place.key[1]} has no place in the "
                "network that the arguments describe"
            )
        if "lm_head.bias" in self._places:
            self.refusal = (
                "it is a BERT, which can be inspected and not yet trained or converted here"
            )

    def _find_optimizer(self) -> None:
        """Decides whether there is optimizer state to go on from, and fills the counters."""
        self._has_moments = False
        try:
            steps = set(self._all_steps())
            consumed = self._arguments.get("consumed_train_samples")
            if len(steps) != 1:
                raise UnusableError(f"its ranks have done different numbers of steps, {steps}")
            if self.iteration is None or not isinstance(consumed, int):
                raise UnusableError("it does not say how many steps and samples were done")
        except UnusableError as reason:
            self._moments = {}
            self.notes.append(f"weights only: {reason}")
            return
        self._has_moments = True
        self.state = {
            "iteration": self.iteration,
            "consumed_samples": consumed,
            "optimizer_step": steps.pop(),
            "loss_scaler": {},
        }

    def _all_steps(self) -> Iterator[int]:
        """Adam's number of steps of every rank."""
        if "lm_head.bias" in self._places:
            raise UnusableError("optimizer state of BERT is not read")
        for pipeline in range(self.pipeline_size):
            for file in self._stage(pipeline):
                yield adam_state(file.optimizer, file.chunks)[1]

    def _state(self, number: int, file: RankFile) -> dict[Key, dict[str, Tensor]]:
        assert self._open is not None
        key = self._open[0], number
        if key not in self._moments:
            self._moments[key] = adam_state(file.optimizer, file.chunks)[0]
        return self._moments[key]

    def _canonical(self, name: str, share: Tensor, path: Path) -> Tensor:
        """A rank's share with its rows in our order."""
        if ".attention.qkv." not in name:
            return share
        attention = self.model.attention
        heads, groups = attention.num_attention_heads, attention.num_query_groups
        size = self.tensor_size
        try:
            return qkv_from_megatron(
                share, self.version, heads // size, groups // size, attention.kv_channels
            )
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
