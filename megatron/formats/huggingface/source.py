"""A model of Hugging Face as a checkpoint: whole parameters with canonical names."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.source import Source, copy_tokenizer_files
from megatron.config import ModelConfig, TokenizerConfig
from megatron.formats.features import whole_shards
from megatron.formats.generation_settings import ends_of, read_generation, write_generation
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.entries import Parameter
from megatron.formats.huggingface.packed import packing_of
from megatron.formats.huggingface.weight_files import WeightFiles, indexed, some, weights_of
from megatron.formats.huggingface.within import head_tied, renaming, text_content

TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""Files, at least one of which a tokenizer has."""
_FIELD = "mtp_num_layers"
_BUFFERS = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|position_ids|(attn|attention|self_attn|self_attention)\.(bias|masked_bias))"
)
"""Tensors of older files that follow from the configuration."""


class TableSource(Source):
    """Weights that an architecture's table describes."""

    _parameters: Mapping[str, Parameter]

    @abstractmethod
    def _part(self, theirs: str) -> Tensor:
        """A tensor of the table, in the dtype of the file."""

    def names(self) -> Sequence[str]:
        return list(self._parameters)

    def kinds(self, name: str) -> Sequence[str]:
        self._parameter(name)
        return ["weight"]

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        parameter = self._parameter(name)
        if kind != "weight":
            raise CheckpointError(f"{self.folder} has no {kind} of {name}, only weights")
        return parameter.from_hf(self._part(theirs).float() for theirs in parameter.theirs)

    def _parameter(self, name: str) -> Parameter:
        if name not in self._parameters:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return self._parameters[name]


class HuggingFaceFolder(TableSource):
    """A folder with config.json and weights, for a model of one of the known architectures. Raises
    CheckpointError if a file is missing or damaged, tensors are missing, superfluous or of another
    shape, or a value in config.json cannot be represented."""

    title = "model of Hugging Face"
    read_by_transformers: ClassVar[bool] = True
    """False for folders of other programs, which transformers cannot open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._config = config = self._find_config()
        whole = self._read_config(config)
        content = text_content(whole, config)
        self.architecture: Architecture = architecture_named(content, config)
        self.renamed = renaming(whole)
        self._weights: Any = self._open_weights(whole)
        if self.renamed is not None:
            content = head_tied(content, whole, "lm_head.weight" in self._weights)
        content = self.architecture.seen(content, self._weights)
        self.model: ModelConfig = self.architecture.model(content, config)
        self._bare = not any(
            name.startswith(self.architecture.base_prefix) for name in self._weights.files
        )
        self._whole = whole
        self._describe()
        self.tokenizer = tokenizer_in(folder)

    def _find_config(self) -> Path:
        """Return the file that describes the network."""
        return self.folder / "config.json"

    def _read_config(self, config: Path) -> dict[str, Any]:
        """Return the keys of config.json."""
        return _content(config)

    def _open_weights(self, content: dict[str, Any]) -> Any:
        """Return the tensors by their names in the files: an object like :class:`WeightFiles`."""
        packing = packing_of(content, self._config)
        return WeightFiles(self.folder, packing, renaming(content))

    def _describe(self) -> None:
        """Compare the tensors of the files with the model's."""
        self.notes = ()
        self._parameters = {
            each.ours: self._as_stored(each) for each in self.architecture.parameters(self.model)
        }
        self._stored = self._match()
        self._shapes = shapes_of(self.model, self._config)
        self._check_shapes()
        if self.renamed is not None:
            note = f"the text model of {self._whole['model_type']} is read, and nothing else"
            remedy = f"to-hf --origin {self.folder} writes it back there"
            self.notes = (*self.notes, f"{self.folder}: {note}; {remedy}")

    def read_ahead(self) -> None:
        ahead = self.architecture.ahead
        stored = 0 if ahead is None else ahead.stored(self.model, self._spelling)
        if stored:
            # By its flags: the feature that has them may have been removed.
            members: Sequence[Any] = self.model.parts
            parts = [
                replace(part, **{_FIELD: stored}) if hasattr(part, _FIELD) else part
                for part in members
            ]
            self.model = replace(self.model, parts=tuple(parts))
            self._describe()

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        config = path / "config.json"
        if not config.is_file():
            return None
        if weights_of(path) is None:
            content = read_json(config, lenient=True)
            if not isinstance(content, dict) or "model_type" not in content:
                return None
        if wanted is not None:
            raise CheckpointError(f"{path} is a model of Hugging Face, and has no {wanted}")
        return path

    @classmethod
    def family(cls, folder: Path) -> str:
        config = folder / "config.json"
        return architecture_named(text_content(_content(config), config), config).family

    def shape(self, name: str) -> tuple[int, ...]:
        self._parameter(name)
        return self._shapes[name]

    def dtype(self, name: str, kind: str = "weight") -> str:
        first = self._parameter(name).theirs[0]
        return str(self._weights.dtype(self._stored[first])).removeprefix("torch.")

    def _part(self, theirs: str) -> Tensor:
        return self._weights.tensor(self._stored[theirs])

    @property
    def weight_files(self) -> list[Path]:
        """The files of all tensors, including parts other than the model."""
        path = self._weights.path
        return [path] if path.suffix != ".json" else sorted({*indexed(path).values()})

    @property
    def is_plain(self) -> bool:
        """True if no weight is stored in several tensors, as quantised ones are."""
        return not self._weights.packed

    def places(self) -> dict[str, tuple[Parameter, str]]:
        """By name in the files of a separate text model: the parameter that a tensor is part of,
        and the table's name of that part."""
        return {
            self._stored[theirs]: (parameter, theirs)
            for parameter in self._parameters.values()
            for theirs in parameter.theirs
        }

    @property
    def generation(self) -> dict[str, Any]:
        """See :attr:`Source.generation`; config.json names the end of a text where the other file
        does not."""
        rows = self.model.vocabulary.size
        return read_generation(self.folder, rows, self.architecture.model_type)

    def copy_tokenizer(self, target: Path) -> bool:
        has_tokenizer = copy_tokenizer(self.folder, target)
        generation = self.generation
        if has_tokenizer or ends_of(generation):
            write_generation(target, generation)
        return has_tokenizer

    def _as_stored(self, parameter: Parameter) -> Parameter:
        """The way in which the files have a parameter."""
        ways = (parameter, *parameter.others)
        return next((way for way in ways if self._spelling(way.theirs[0])), parameter)

    def _spelling(self, theirs: str) -> str | None:
        """The name in the files of a tensor of the table; None if they lack it."""
        form = self.architecture
        name = theirs.removeprefix(form.base_prefix) if self._bare else theirs
        spellings = [name] + [
            name.removesuffix(ours) + other
            for ours, other in form.endings.items()
            if name.endswith(ours)
        ]
        spellings += [
            other + name.removeprefix(ours)
            for ours, other in form.beginnings.items()
            if name.startswith(ours)
        ]
        return next((name for name in spellings if name in self._weights), None)

    def _match(self) -> dict[str, str]:
        """Name in the files of each tensor of the table."""
        form, files = self.architecture, self._weights.files
        stored, missing = {}, []
        wanted = [name for each in self._parameters.values() for name in each.theirs]
        for theirs in [*wanted, *form.constants(self.model)]:
            spelling = self._spelling(theirs)
            if spelling is None and theirs not in form.optional:
                missing.append(theirs)
            elif spelling is not None:
                stored[theirs] = spelling
        described = f"a model ({form.title}) as {self._config} describes it"
        if missing:
            raise CheckpointError(
                f"{self._weights.path} lacks {some(missing)}; {described} has such tensors"
            )
        ahead, pattern, later, copies = form.ahead, form.predicting(self.model), "", {}
        if ahead is not None:
            later = ahead.pattern(self.model, ahead.stored(self.model, self._spelling))
            copies = ahead.copies_of(self.model)
        further = [name for name in files if re.fullmatch(f"{pattern}|{later}", name)]
        further = sorted({*further} - {*stored.values(), *copies})
        if further:
            predicting = any(re.fullmatch(later, name) for name in further)
            self.notes = (
                f"{self.folder}: {some(further)} are not read: they predict further tokens "
                "(multi-token prediction) or see images"
                + ("; a run with --mtp-num-layers has the former" if predicting else ""),
            )
        further += copies
        foreign = [
            name
            for name in sorted({*files} - {*stored.values(), *further} - form.ignored(self.model))
            if not _BUFFERS.fullmatch(name) and not self._is_copy(name, stored)
        ]
        if foreign:
            raise CheckpointError(
                f"{self._weights.path} contains {some(foreign)}; {described} has no such tensors"
            )
        return stored

    def _is_copy(self, name: str, stored: dict[str, str]) -> bool:
        """True if it repeats another tensor, as a head does that uses the token embedding."""
        copies = self.architecture.copies(self.model)
        if name not in copies:
            return False
        (first,) = self._parameters[copies[name]].theirs
        if torch.equal(self._weights.tensor(name), self._weights.tensor(stored[first])):
            return True
        raise CheckpointError(
            f"{self._weights.files[name]}: {name} differs from {stored[first]}, but "
            f"{self._config} says that they are tied (tie_word_embeddings)"
        )

    def _check_shapes(self) -> None:
        assert self._shapes.keys() == self._parameters.keys(), (
            f"the table of {self.architecture.title} and the model differ in "
            f"{sorted(self._shapes.keys() ^ self._parameters.keys())}"
        )
        for name, parameter in self._parameters.items():
            expected = parameter.to_hf(torch.empty(self._shapes[name], device="meta"))
            for theirs, like in expected.items():
                shape = self._weights.shape(self._stored[theirs])
                if shape != tuple(like.shape):
                    raise CheckpointError(
                        f"{self._weights.files[self._stored[theirs]]}: {theirs} has the shape "
                        f"{shape}; {self._config.name} makes it {tuple(like.shape)}"
                    )


def tokenizer_in(folder: Path) -> TokenizerConfig | None:
    """The flags of the tokenizer whose files are in a folder; None without any."""
    if not any((folder / name).is_file() for name in TOKENIZER):
        return None
    return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))


def copy_tokenizer(folder: Path, target: Path) -> bool:
    """Copies the files of a tokenizer, and generation_config.json, to a new folder; returns True if
    there is a tokenizer."""
    if tokenizer_in(folder) is None:
        return False
    copy_tokenizer_files(folder, target)
    return True


def _content(config: Path) -> dict[str, Any]:
    content = read_json(config, lenient=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{config} is not a JSON object")
    return content


def shapes_of(model: ModelConfig, config: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of the network, by canonical name. Raises CheckpointError if no
    tensor can have such sizes."""
    try:
        shards = whole_shards(model)
    except (TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{config}: no tensor can be as large as that of the network: {reason}"
        ) from None
    return {name: shard.canonical_shape for name, shard in shards.items()}
