"""Checkpoint source for Hugging Face models: whole parameters with canonical names."""

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
"""Names of tokenizer files. A folder with a tokenizer has at least one of these."""
_FIELD = "mtp_num_layers"
_BUFFERS = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|position_ids|(attn|attention|self_attn|self_attention)\.(bias|masked_bias))"
)
"""Tensors in older files that can be computed from the configuration, and are ignored."""


class TableSource(Source):
    """Source whose tensors are described by an architecture's table."""

    _parameters: Mapping[str, Parameter]

    @abstractmethod
    def _part(self, theirs: str) -> Tensor:
        """Read a tensor, by its name in the table, in the dtype in which its file stores it."""

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
    """A folder with the config.json and weights of a supported architecture. Raises CheckpointError
    if a file is missing or damaged, if tensors are missing, unexpected or of the wrong shape, or if
    a value in config.json cannot be represented."""

    title = "model of Hugging Face"
    read_by_transformers: ClassVar[bool] = True
    """False for other programs' folders, which transformers cannot open."""

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
        """Open the weights. Return an object like :class:`WeightFiles`, with the tensors by their
        names in the files."""
        packing = packing_of(content, self._config)
        return WeightFiles(self.folder, packing, renaming(content))

    def _describe(self) -> None:
        """Match the tensors in the files with the model's parameters."""
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
            # The field is set by name, because the feature that defines it may have been deleted.
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
        """Files that contain tensors, including those that are not in the text model."""
        path = self._weights.path
        return [path] if path.suffix != ".json" else sorted({*indexed(path).values()})

    @property
    def is_plain(self) -> bool:
        """True if no weight is quantised, that is, stored in several tensors."""
        return not self._weights.packed

    def places(self) -> dict[str, tuple[Parameter, str]]:
        """Return, by tensor name in the text model's own files, the parameter that the tensor
        belongs to and the tensor's name in the table."""
        return {
            self._stored[theirs]: (parameter, theirs)
            for parameter in self._parameters.values()
            for theirs in parameter.theirs
        }

    @property
    def generation(self) -> dict[str, Any]:
        """Generation settings; see :attr:`Source.generation`. config.json provides the end-of-text
        token if generation_config.json does not."""
        rows = self.model.vocabulary.size
        return read_generation(self.folder, rows, self.architecture.model_type)

    def copy_tokenizer(self, target: Path) -> bool:
        has_tokenizer = copy_tokenizer(self.folder, target)
        generation = self.generation
        if has_tokenizer or ends_of(generation):
            write_generation(target, generation)
        return has_tokenizer

    def _as_stored(self, parameter: Parameter) -> Parameter:
        """Return the parameter with the layout that the files use."""
        ways = (parameter, *parameter.others)
        return next((way for way in ways if self._spelling(way.theirs[0])), parameter)

    def _spelling(self, theirs: str) -> str | None:
        """Return the name under which the files store a tensor of the table, or None if it is
        missing."""
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
        """Return the name in the files of each tensor in the table. Raises CheckpointError if
        tensors are missing or unexpected."""
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
        """Return whether a tensor is a copy of another one, as a tied head copies the token
        embedding. Raises CheckpointError if it should be a copy but has other values."""
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
    """Return the flags that select the tokenizer in a folder, or None if it has no tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER):
        return None
    return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))


def copy_tokenizer(folder: Path, target: Path) -> bool:
    """Copy a tokenizer's files and generation_config.json. Return whether there is a tokenizer."""
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
    """Return the shape of each parameter of a network, by canonical name. Raises CheckpointError,
    which names ``config``, if a tensor would be impossibly large."""
    try:
        shards = whole_shards(model)
    except (TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{config}: no tensor can be as large as that of the network: {reason}"
        ) from None
    return {name: shard.canonical_shape for name, shard in shards.items()}
