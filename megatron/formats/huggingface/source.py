"""A model of Hugging Face as a checkpoint: whole parameters with canonical names, from safetensors
or torch.save, in one file or in several with an index."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.generation_settings import ends_of, read_generation, write_generation
from megatron.checkpoint.source import Source, copy_tokenizer_files
from megatron.config import ModelConfig, TokenizerConfig
from megatron.formats.features import whole_shards
from megatron.formats.huggingface import architecture_named, float8, mxfp4
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.entries import Parameter
from megatron.formats.unpickle import load_pickle

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights or their index, in the order in which transformers looks for them."""
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""Files of which at least one makes a tokenizer."""
_FIELD = "mtp_num_layers"
_BUFFERS = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|position_ids|(attn|attention|self_attn|self_attention)\.(bias|masked_bias))"
)
"""Tensors of older files that follow from the configuration."""


class WeightFiles:
    """Reads single tensors; nothing stays in memory. The two tensors of a weight in MXFP4, or in 8
    bits, are one. Raises CheckpointError if there are no such files, or one is damaged or not what
    the index says."""

    def __init__(self, folder: Path) -> None:
        path = _weights_of(folder)
        if path is None:
            raise CheckpointError(f"{folder} has none of {', '.join(WEIGHTS)}")
        self.path = path
        self._open: dict[Path, Any] = {}
        self._packed: dict[str, tuple[Path, Path]] = {}
        if path.suffix != ".json":
            self.files = dict.fromkeys(self._handle(path).keys(), path)
        else:
            self._read_index(path)
        for blocks in [name for name in self.files if name.endswith(mxfp4.BLOCKS)]:
            name = blocks.removesuffix(mxfp4.BLOCKS)
            if name + mxfp4.SCALES in self.files:
                packed = self.files.pop(blocks), self.files.pop(name + mxfp4.SCALES)
                self._packed[name], self.files[name] = packed, packed[0]
        self._scales: dict[str, Path] = {}
        for scales in [name for name in self.files if name.endswith(float8.SCALES)]:
            name = scales.removesuffix(float8.SCALES)
            if name in self.files:
                self._scales[name] = self.files.pop(scales)

    def _read_index(self, path: Path) -> None:
        self.files = _indexed(path)
        for file in sorted(set(self.files.values())):
            stored = list(self._handle(file).keys())
            missing = {name for name, place in self.files.items() if place == file} - set(stored)
            if missing:
                raise CheckpointError(
                    f"{file} lacks {_some(sorted(missing))}, which {path.name} says it has"
                )
            self.files = dict.fromkeys(stored, file) | self.files

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read."""
        if name in self._packed:
            shape = self._shape(name + mxfp4.BLOCKS, self.files[name])
            return mxfp4.shape_of(shape) if len(shape) == 4 else tuple(self.tensor(name).shape)
        shape = self._shape(name, self.files[name])
        if name in self._scales:
            scales = self._shape(name + float8.SCALES, self._scales[name])
            try:
                float8.check_scales(shape, scales)
            except ValueError as error:
                raise self._wrong(name + float8.SCALES, self._scales[name], error) from None
        return shape

    def _shape(self, name: str, path: Path) -> tuple[int, ...]:
        handle = self._handle(path)
        if isinstance(handle, dict):
            return tuple(handle[name].shape)
        return tuple(handle.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor, in the dtype of the file; MXFP4 as bfloat16, and numbers of 8 bits times their
        scales as float32."""
        if name in self._scales:
            stored, factors = self._tensor(name, self.files[name]), name + float8.SCALES
            try:
                return float8.scaled(stored, self._tensor(factors, self._scales[name]))
            except ValueError as error:
                raise self._wrong(name, self.files[name], error) from None
        if name not in self._packed:
            stored = self._tensor(name, self.files[name])
            if stored.dtype == float8.DTYPE:
                missing = ValueError(f"numbers of 8 bits require scales, {name}{float8.SCALES}")
                raise self._wrong(name, self.files[name], missing)
            return stored
        blocks, scales = self._packed[name]
        try:
            return mxfp4.unpacked(
                self._tensor(name + mxfp4.BLOCKS, blocks),
                self._tensor(name + mxfp4.SCALES, scales),
            )
        except ValueError as error:
            raise self._wrong(name, blocks, error) from None

    def _wrong(self, name: str, path: Path, error: ValueError) -> CheckpointError:
        return CheckpointError(f"{path}: {name}: {error}")

    def _tensor(self, name: str, path: Path) -> Tensor:
        handle = self._handle(path)
        try:
            return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name}: {error}") from None

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, which is not read."""
        if name in self._packed:
            return torch.bfloat16
        handle = self._handle(self.files[name])
        return (handle[name] if isinstance(handle, dict) else handle.get_slice(name)[:0]).dtype

    def _handle(self, path: Path) -> Any:
        """An open safetensors file, or the tensors of a pickle, mapped into memory by name."""
        if path not in self._open:
            if path.suffix != ".safetensors":
                self._open[path] = _unpickled(path)
            else:
                try:
                    self._open[path] = safe_open(path, framework="pt")
                except SafetensorError as error:
                    raise CheckpointError(
                        f"{path} is incomplete or no safetensors file: {error}; download or copy "
                        "it again"
                    ) from None
                except OSError as error:
                    raise CheckpointError(f"{path}: {error}") from None
        return self._open[path]


def _weights_of(folder: Path) -> Path | None:
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def _indexed(path: Path) -> dict[str, Path]:
    content = read_json(path, lenient=True)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise CheckpointError(f"{path} has no weight_map from names to files")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file of this folder")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path.parent / file} is missing; {path.name} names it")
    return {name: path.parent / file for name, file in weight_map.items()}


def _unpickled(path: Path) -> dict[str, Tensor]:
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is {type(value).__name__}, not a tensor")
    return {name: value.detach() for name, value in content.items()}


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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = folder / "config.json"
        content = _content(folder)
        self.architecture: Architecture = architecture_named(content, config)
        self._weights = WeightFiles(folder)
        content = self.architecture.seen(content, self._weights)
        self.model: ModelConfig = self.architecture.model(content, config)
        self._bare = not any(
            name.startswith(self.architecture.base_prefix) for name in self._weights.files
        )
        self._describe()
        self.tokenizer = tokenizer_in(folder)

    def _describe(self) -> None:
        """Compare the tensors of the files with those of the model."""
        self._parameters = {
            each.ours: self._as_stored(each) for each in self.architecture.parameters(self.model)
        }
        self._stored = self._match()
        self._shapes = shapes_of(self.model, self.folder / "config.json")
        self._check_shapes()

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
            self.model, self.notes = replace(self.model, parts=tuple(parts)), ()
            self._describe()

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        config = path / "config.json"
        if not config.is_file():
            return None
        if _weights_of(path) is None:
            content = read_json(config, lenient=True)
            if not isinstance(content, dict) or "model_type" not in content:
                return None
        if wanted is not None:
            raise CheckpointError(f"{path} is a model of Hugging Face, and has no {wanted}")
        return path

    @classmethod
    def family(cls, folder: Path) -> str:
        return architecture_named(_content(folder), folder / "config.json").family

    def shape(self, name: str) -> tuple[int, ...]:
        self._parameter(name)
        return self._shapes[name]

    def dtype(self, name: str, kind: str = "weight") -> str:
        first = self._parameter(name).theirs[0]
        return str(self._weights.dtype(self._stored[first])).removeprefix("torch.")

    def _part(self, theirs: str) -> Tensor:
        return self._weights.tensor(self._stored[theirs])

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
            if spelling is None:
                missing.append(theirs)
            else:
                stored[theirs] = spelling
        described = f"a model ({form.title}) as {self.folder / 'config.json'} describes it"
        if missing:
            raise CheckpointError(
                f"{self._weights.path} lacks {_some(missing)}; {described} has such tensors"
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
                f"{self.folder}: {_some(further)} are not read: they predict further tokens "
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
                f"{self._weights.path} contains {_some(foreign)}; {described} has no such tensors"
            )
        return stored

    def _is_copy(self, name: str, stored: dict[str, str]) -> bool:
        """True if it repeats another tensor, as that of a head that uses the token embedding."""
        copies = self.architecture.copies(self.model)
        if name not in copies:
            return False
        (first,) = self._parameters[copies[name]].theirs
        if torch.equal(self._weights.tensor(name), self._weights.tensor(stored[first])):
            return True
        raise CheckpointError(
            f"{self._weights.files[name]}: {name} differs from {stored[first]}, but "
            f"{self.folder}/config.json says that they are tied (tie_word_embeddings)"
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
                        f"{shape}; config.json makes it {tuple(like.shape)}"
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


def _content(folder: Path) -> dict[str, Any]:
    config = folder / "config.json"
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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
