"""Checkpoint source for a model in GGUF files: dequantised, unsharded, with canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.formats.generation_settings import write_generation
from megatron.formats.gguf.architectures import Kind
from megatron.formats.gguf.container import PART, PLAIN, GGUFFile, Keys
from megatron.formats.gguf.kinds import kind_named
from megatron.formats.gguf.rope import ROPE_TENSORS
from megatron.formats.gguf.tokenizer import end_of_text, save_tokenizer
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.source import TableSource, shapes_of

SUFFIX = ".gguf"
HEAD, TABLE = "output.weight", "token_embd.weight"
_PROJECTOR = "mmproj"
"""File name prefix of image projectors, which are stored next to the model's file."""


class GGUFModel(TableSource):
    """A model in one or several GGUF files. Tensors are memory-mapped, and dequantised when they
    are needed. Raises CheckpointError if a file is missing or damaged, if tensors are missing,
    superfluous or of a different shape, or if the metadata describe an unsupported network."""

    title = "GGUF file"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if find_spec("gguf") is None:
            raise CheckpointError(f"{folder}: GGUF files need the package gguf: pip install gguf")
        self.file = GGUFFile(folder)
        self.kind: Kind = kind_named(self.file.metadata.get("general.architecture"), str(folder))
        content = config_of(self.kind, self.file)
        self.architecture = architecture_named(content, folder)
        self.model: ModelConfig = self.architecture.model(content, folder)
        self._parameters = {each.ours: each for each in self.architecture.parameters(self.model)}
        blocks = self.model.num_layers
        self._places = {
            theirs: self.kind.places(theirs, blocks)
            for each in self._parameters.values()
            for theirs in each.theirs
        }
        self._check_names()
        self._shapes = shapes_of(self.model, folder)
        self._check_shapes()
        if self.file.metadata.get("tokenizer.ggml.model") is not None:
            self.notes = (
                "the file has its tokenizer within: a converted checkpoint has it as files, a run "
                "that starts from the file needs --tokenizer-type and its files",
            )

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        files = [path] if path.suffix == SUFFIX and path.is_file() else []
        if path.is_dir():
            files = sorted(
                each
                for each in path.glob(f"*{SUFFIX}")
                if each.is_file() and not each.name.startswith(_PROJECTOR)
            )
        if not files:
            return None
        models = {match[1] if (match := PART.fullmatch(f.name)) else f.name: f for f in files[::-1]}
        if len(models) > 1:
            names = ", ".join(each.name for each in [*models.values()][::-1][:5])
            raise CheckpointError(f"{path} has several GGUF models: name one of {names}")
        if wanted is not None:
            raise CheckpointError(f"{path} is a GGUF model, and has no {wanted}")
        return files[0]

    def shape(self, name: str) -> tuple[int, ...]:
        self._parameter(name)
        return self._shapes[name]

    def dtype(self, name: str, kind: str = "weight") -> str:
        place = self._places[self._parameter(name).theirs[0]][0]
        stored = PLAIN.get(self.file.tensors[place.name].kind, torch.float32)
        return str(stored).removeprefix("torch.")

    def _part(self, theirs: str) -> Tensor:
        """Return a tensor in Hugging Face's layout, by its Hugging Face name."""
        return self.kind.from_file(theirs, lambda place: self.file.tensor(*place), self.model)

    @cached_property
    def generation(self) -> dict[str, Any]:
        """Generation settings: the end-of-text token in the metadata. See
        :attr:`Source.generation`."""
        return end_of_text(self.file.metadata, self.model.vocabulary.size, self.folder)

    def copy_tokenizer(self, target: Path) -> bool:
        """Write the tokenizer that the metadata contain. See :meth:`Source.copy_tokenizer`."""
        metadata = self.file.metadata
        written = save_tokenizer(metadata, target, self.model.vocabulary.size, self.folder)
        write_generation(target, self.generation)
        return written

    def _check_names(self) -> None:
        """Raise CheckpointError if tensors are missing or superfluous."""
        expected = {place.name for places in self._places.values() for place in places}
        described = f"a model as its metadata describe it ({self.kind.name})"
        if missing := sorted(expected - self.file.tensors.keys()):
            raise CheckpointError(
                f"{self.folder} lacks {', '.join(missing[:5])}; {described} has it"
            )
        surplus = self.file.tensors.keys() - expected - {*ROPE_TENSORS}
        foreign = sorted(surplus - {HEAD} if self.model.embedding.tied else surplus)
        if foreign:
            raise CheckpointError(
                f"{self.folder} contains {', '.join(map(repr, foreign[:5]))}; {described} has no "
                "such tensors"
            )

    def _check_shapes(self) -> None:
        for name, parameter in self._parameters.items():
            expected = parameter.to_hf(torch.empty(self._shapes[name], device="meta"))
            for theirs, like in expected.items():
                for place, part in self.kind.to_file(theirs, like, self.model).items():
                    shape = tuple(part.shape)
                    if place.expert is not None:
                        shape = (parameter.slices or 1, *shape)
                    stored = self.file.tensors[place.name]
                    if stored.shape != shape:
                        raise CheckpointError(
                            f"{stored.path}: {place.name} has the shape {stored.shape}; the "
                            f"metadata make it {shape}"
                        )


def config_of(kind: Kind, file: GGUFFile) -> dict[str, Any]:
    """Derive a model's config.json from its metadata, the number of rows in its token embedding,
    and whether it has a separate head. Raises CheckpointError if the metadata are malformed."""
    where, tensors = str(file.path), file.tensors
    if TABLE not in tensors or len(tensors[TABLE].shape) != 2:
        raise CheckpointError(f"{where} has no {TABLE}, a matrix")
    content = kind.config(Keys(file.metadata, kind.name, tensors, file.tensor, where))
    return content | {
        "vocab_size": tensors[TABLE].shape[0],
        "tie_word_embeddings": tied(tensors),
    }


def tied(tensors: Mapping[str, Any]) -> bool:
    """Return whether a model has no separate head, or a head equal to the token embedding."""
    if HEAD not in tensors:
        return True
    head, table = tensors[HEAD], tensors[TABLE]
    alike = (head.kind, head.shape) == (table.kind, table.shape)
    bytes_of = (np.frombuffer(each.data, np.uint8) for each in (head, table))
    return alike and np.array_equal(next(bytes_of), next(bytes_of))
