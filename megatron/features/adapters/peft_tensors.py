"""The tensors of a folder of peft: low-rank additions to the linear layers of blocks, and whole
tensors of the merged model: trained modules (``modules_to_save``), embeddings with trained tokens
(``trainable_token_indices``) or additions, and embeddings of another vocabulary.

Of experts, which are parameters of several matrices (``target_parameters``), A has the rows of all,
expert by expert, and B their columns, the experts of a column together. Two parameters of a module
are wrapped in their order: the names of the first have ``base_layer``.

Of a base whose head is its embedding (tied), peft trains a copy of one and leaves the other as it
was, so that the merged model's head is untied, unless ``ensure_weight_tying`` is set, or only
tokens of the embedding were trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.features.adapters.checkpoint import adapter_name
from megatron.formats.derived import DerivedSource
from megatron.formats.huggingface import ModuleTarget, architecture_of, linear_targets
from megatron.formats.huggingface.entries import Parameter
from megatron.formats.huggingface.tasks import CausalLM
from megatron.formats.unpickle import load_pickle

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
KINDS = {"A": "a", "B": "b", "magnitude_vector": "magnitude"}
"""Kinds of an adapter's parameters by the ending of ``lora_`` in their names."""

EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_ADAPTER = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)(?:\.\w+)??(?:\.weight)?")
_PIECES = {
    "trained": re.compile(r"^(.+)\.modules_to_save(?:\.\w+)??\.(\w+)"),
    "base": re.compile(r"^(.+?)\.(?:original_module|(?:token_adapter\.)?base_layer)\.(\w+)"),
    "tokens": re.compile(r"^(.+)\.token_adapter\.trainable_tokens_delta(?:\.\w+)??()"),
    "A": re.compile(r"^(.+)\.lora_(?:embedding_)?A(?:\.\w+)??(?:\.weight)?()"),
    "B": re.compile(r"^(.+)\.lora_(?:embedding_)?B(?:\.\w+)??(?:\.weight)?()"),
}
"""Contents of a file for a whole tensor, by the form of its name: the trained values, the base's
values, some rows, or an addition."""


class Place(NamedTuple):
    """Place of an adapter: its layer by canonical name, and its module."""

    layer: str
    target: ModuleTarget

    def name(self, kind: str) -> str:
        """The canonical name of one of its parameters, ``kind`` a, b or magnitude."""
        part = f"{self.target.part}_" if self.target.part else ""
        return f"{self.layer}.lora_{part}{kind}"

    def to_peft(self, values: Tensor, kind: str) -> Tensor:
        """Return one of its parameters in peft's form."""
        values = values if kind == "a" else self.target.rows_to_hf(values)
        if self.target.stacked:  # [E, r, I] to [E r, I], and [E, O, r] to [O, r E]
            values = values.flatten(0, 1) if kind == "a" else values.permute(1, 2, 0).flatten(1)
        return values.contiguous()

    def from_peft(self, values: Tensor, kind: str, experts: int) -> Tensor:
        """The inverse of :meth:`to_peft`."""
        if self.target.stacked and kind == "a":
            values = values.unflatten(0, (experts, -1))
        elif self.target.stacked:
            values = values.unflatten(1, (-1, experts)).permute(2, 0, 1)
        return values.contiguous() if kind == "a" else self.target.rows_from_hf(values)


def places(model: ModelConfig) -> dict[str, Place]:
    """The linear modules of all blocks of a model, by the names of Hugging Face."""
    stacks = architecture_of(model).stacks
    return {
        target.module.format(n=n): Place(target.layer.format(n=n), target)
        for target in linear_targets(model)
        for n in range(stacks[target.layer.partition(".{n}.")[0]](model))
    }


def wrappers(targets: Mapping[str, Place], parameters: Sequence[str]) -> dict[str, str]:
    """Names of the modules that peft puts around linear modules, and around the parameters with one
    of these endings, by the names of both."""
    names: dict[str, str] = {}
    for name, place in reversed([*targets.items()]):
        if not place.target.stacked:
            names[name] = name
        elif any(ends(name, ending) for ending in parameters):
            module = name.rpartition(".")[0]
            names[name] = f"{module}.base_layer" if module in names.values() else module
    return {name: names[name] for name in targets if name in names}


def ends(module: str, ending: str) -> bool:
    """True if a module's name ends with these parts, by which peft chooses it."""
    return f".{module}".endswith(f".{ending}")


class PeftTensors(DerivedSource):
    """The tensors of a folder of peft by canonical name, float32, the rows in our order; ``model``
    is the merged one. Raises CheckpointError if one is not known, or the folder does not fit its
    base.

    Args:
        content: adapter_config.json.
        scale: the factor of the addition to a module, of a rank.
    """

    title = "tensors of peft"

    def __init__(
        self, folder: Path, base: Source, content: Mapping[str, Any],
        scale: Callable[[str, int], float],
    ) -> None:  # fmt: skip
        super().__init__(folder)
        self._base, self._content, self._scale = base, content, scale
        name = next((name for name in WEIGHTS if (folder / name).is_file()), None)
        if name is None:
            raise CheckpointError(f"{folder} has none of {', '.join(WEIGHTS)}")
        self._path = folder / name
        self._tensors = _opened(self._path)
        self._additions: dict[str, tuple[str, Place]] = {}
        self._pieces: dict[str, dict[str, str]] = {}
        self._before = {each.ours: each for each in _parameters(base.model)}
        self._embedding = self._before[EMBEDDING].theirs[0] if EMBEDDING in self._before else ""
        self._head = head_of(base.model)
        self._sort()
        self.model = self._merged()
        self._whole = {
            each.ours: each
            for each in _parameters(self.model)
            if any(self._pieces.get(theirs) for theirs in each.theirs)
            or (each.ours == _HEAD and base.model.embedding.tied)
        }

    def _sort(self) -> None:
        architecture = architecture_of(self._base.model)
        targets = places(self._base.model)
        wrapped = wrappers(targets, self._content.get("target_parameters") or [])
        modules = {module: targets[name] for name, module in wrapped.items()}
        known = {theirs for each in self._before.values() for theirs in each.theirs} | {self._head}
        for key in self._tensors:
            name = key.removeprefix(PREFIX)
            match = _ADAPTER.fullmatch(name)
            if match is not None and match[1] in modules:
                place = modules[match[1]]
                self._additions[place.name(KINDS[match[2]])] = key, place
                continue
            theirs, piece = self._piece_of(name)
            for ours, other in architecture.endings.items():
                if theirs not in known and theirs.endswith(other):
                    theirs = theirs.removesuffix(other) + ours
            if theirs not in known:
                raise CheckpointError(
                    f"{self._path}: {key} is of no linear layer of the blocks of the base "
                    f"({architecture.title}), and cannot be represented"
                )
            # A name without a wrapper has the same values as the wrapper's name.
            pieces = self._pieces.setdefault(theirs, {})
            if piece not in pieces or name != theirs:
                pieces[piece] = key

    def _piece_of(self, name: str) -> tuple[str, str]:
        """Return the whole tensor of a tensor in the file, and its member of :data:`_PIECES`."""
        for piece, form in _PIECES.items():
            if match := form.fullmatch(name):
                return f"{match[1]}.{match[2] or 'weight'}", piece
        saved = self._content.get("modules_to_save") or []
        module = name.rpartition(".")[0]
        return name, "trained" if any(module.endswith(each) for each in saved) else "base"

    def _merged(self) -> ModelConfig:
        """The base's configuration with the number of tokens and the head that the file makes."""
        model, form = self._base.model, architecture_of(self._base.model)
        pieces = [self._pieces.get(name, {}).keys() for name in (self._embedding, self._head)]
        if not any(pieces):
            return model
        if not isinstance(form.task_of(model), CausalLM):
            raise CheckpointError(
                f"{self._path} has an embedding or head of its own, which is read for decoders "
                f"only, and the base is another ({form.title}): save the model that peft's "
                "merge_and_unload makes, and read that"
            )
        if model.embedding.tied and (pieces[0] | pieces[1]) - {"base"} and not self._stay_tied():
            model = _untied(model)
        rows = self._rows(self._embedding)
        if not model.embedding.tied and self._rows(self._head) != rows:
            raise CheckpointError(
                f"{self._path} makes an embedding of {rows} tokens and a head of "
                f"{self._rows(self._head)}: the adapters were saved without one of them; save them "
                "with save_embedding_layers=True"
            )
        return model if rows == model.vocabulary.size else model.with_vocabulary(rows)

    def _stay_tied(self) -> bool:
        """True if the head of a tied base is the merged model's embedding too, as peft decides."""
        here, there = (self._pieces.get(name, {}) for name in (self._embedding, self._head))
        # Embeddings of another name peft leaves untied nevertheless.
        if self._content.get("ensure_weight_tying") and (
            there or "embed_tokens" in self._embedding
        ):
            return True
        indices = self._content.get("trainable_token_indices")
        alike = not isinstance(indices, dict) or len({tuple(v) for v in indices.values()}) == 1
        return "tokens" in here and alike and {*here, *there} <= {"tokens", "base"}

    def names(self) -> Sequence[str]:
        return [*self._additions, *self._whole]

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        if name in self._whole:
            return self._whole_tensor(self._whole[name])
        if name not in self._additions:
            raise CheckpointError(f"{self._path} has no {name}")
        key, place = self._additions[name]
        parsed, values = adapter_name(name), self._read(key)
        assert parsed is not None
        return place.from_peft(values, parsed.kind, self._experts(key, place, values, parsed.kind))

    def _experts(self, key: str, place: Place, values: Tensor, kind: str) -> int:
        """Number of matrices in the parameter of an addition."""
        if not place.target.stacked:
            return 1
        experts, size = self._base.shape(f"{place.layer}.weight")[0], values.shape[kind != "a"]
        if values.dim() != 2 or size % experts:
            raise CheckpointError(
                f"{self._path}: {key} has the shape {tuple(values.shape)}, which is not that of "
                f"additions to {experts} experts"
            )
        return experts

    def _whole_tensor(self, parameter: Parameter) -> Tensor:
        values = parameter.from_hf([self._after(theirs) for theirs in parameter.theirs])
        if parameter.ours in (EMBEDDING, _HEAD):
            expected: tuple[int, ...] = (self.model.vocabulary.size, self.model.hidden_size)
        else:
            expected = self._base.shape(parameter.ours)
        if values.shape != expected:
            raise CheckpointError(
                f"{self._path}: {', '.join(parameter.theirs)} makes {parameter.ours} of the shape "
                f"{tuple(values.shape)}; {self._base.folder} makes it {expected}"
            )
        tied = parameter.ours == EMBEDDING and self.model.embedding.tied
        copied = tied and self._pieces.get(self._head)
        if copied and not torch.equal(values, self._after(self._head)):
            raise CheckpointError(
                f"{self._path}: {self._head} differs from {self._embedding}, but the base's head "
                f"is its embedding ({self._base.folder})"
            )
        return values

    def _after(self, theirs: str) -> Tensor:
        """A tensor of theirs in the merged model."""
        pieces = self._pieces.get(theirs, {})
        if "trained" in pieces:
            return self._read(pieces["trained"])
        values = self._of_base(theirs)
        if "tokens" in pieces:
            rows = self._read(pieces["tokens"])
            tokens = torch.tensor(self._token_indices(theirs), dtype=torch.long)
            inside = bool(((tokens >= 0) & (tokens < len(values))).all())
            if not inside or rows.shape != (len(tokens), *values.shape[1:]):
                raise CheckpointError(
                    f"{self._path}: {pieces['tokens']} has {len(rows)} rows for the tokens "
                    f"{tokens.tolist()} (trainable_token_indices) of {len(values)}"
                )
            values = values.index_copy(0, tokens, rows)
        if pieces.keys() & {"A", "B"}:
            values = values + self._addition(theirs, values)
        return values

    def _of_base(self, theirs: str) -> Tensor:
        """A tensor of theirs in the base, which the file may have."""
        pieces = self._pieces.get(theirs, {})
        if "base" in pieces:
            return self._read(pieces["base"])
        if theirs == self._head and self._base.model.embedding.tied:
            return self._of_base(self._embedding)
        parameter = next(each for each in self._before.values() if theirs in each.theirs)
        return parameter.to_hf(self._base.tensor(parameter.ours))[theirs]

    def _addition(self, theirs: str, values: Tensor) -> Tensor:
        """The low-rank addition to an embedding or head, as peft scales it."""
        pieces = self._pieces[theirs]
        if not {"A", "B"} <= pieces.keys():
            raise CheckpointError(f"{self._path}: the addition to {theirs} lacks a matrix")
        a, b = self._read(pieces["A"]), self._read(pieces["B"])
        rows, columns = values.shape[::-1] if theirs == self._embedding else values.shape
        if a.shape[1:] != (columns,) or b.shape != (rows, len(a)):
            raise CheckpointError(
                f"{self._path}: an addition of shapes {tuple(b.shape)} x {tuple(a.shape)} does not "
                f"fit {theirs} of {tuple(values.shape)}"
            )
        product = (b @ a) * self._scale(theirs.rpartition(".")[0], len(a))
        return product.T if theirs == self._embedding else product

    def _token_indices(self, theirs: str) -> Sequence[int]:
        indices = self._content.get("trainable_token_indices") or []
        if isinstance(indices, dict):
            module = theirs.rpartition(".")[0]
            # A tied head has the embedding's values.
            names = [name for name in indices if module.endswith(name)] or [*indices]
            indices = indices[names[0]]
        return indices

    def _rows(self, theirs: str) -> int:
        pieces = self._pieces.get(theirs, {})
        key = pieces.get("trained") or pieces.get("base")
        if key is not None:
            shape = self._tensors[key].shape
            if len(shape) != 2 or not shape[0]:
                raise CheckpointError(f"{self._path}: {key} has the shape {shape}, not of a matrix")
            return shape[0]
        if theirs == self._head and self._base.model.embedding.tied:
            return self._rows(self._embedding)
        return self._base.model.vocabulary.size

    def _read(self, key: str) -> Tensor:
        try:
            return self._tensors[key].tensor().float()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path}: {key}: {error}") from None


class _Tensor(NamedTuple):
    """A tensor in a file, which is read when it is requested."""

    shape: tuple[int, ...]
    tensor: Callable[[], Tensor]


def _opened(path: Path) -> Mapping[str, _Tensor]:
    """The tensors in a file by key."""
    if path.suffix != ".safetensors":
        content = load_pickle(path)
        return {key: _Tensor(tuple(v.shape), v.detach) for key, v in content.items()}
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return {
        key: _Tensor(tuple(file.get_slice(key).get_shape()), partial(file.get_tensor, key))
        for key in file.keys()  # noqa: SIM118
    }


def _untied(model: ModelConfig) -> ModelConfig:
    embedding = replace(model.embedding, untie_embeddings_and_output_weights=True)
    return replace(model, embedding=embedding)


def head_of(model: ModelConfig) -> str:
    """The name of the head's tensor in files of Hugging Face; empty where it is another head."""
    names = (each.theirs[0] for each in _parameters(_untied(model)) if each.ours == _HEAD)
    return next(names, "")


def module_name(theirs: str) -> str:
    """The name of a tensor in a model of transformers 5, by that in files: GPT-NeoX's head has
    another there."""
    rest = theirs.removeprefix("embed_out")
    return theirs if rest == theirs else f"lm_head{rest}"


def _parameters(model: ModelConfig) -> list[Parameter]:
    return list(architecture_of(model).parameters(model))
