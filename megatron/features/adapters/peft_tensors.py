"""Tensors of a folder in peft's format.

They are the matrices of adapters, and whole tensors of the merged model: trained modules
(``modules_to_save``), embeddings with trained tokens (``trainable_token_indices``) or adapters, and
embeddings with a different vocabulary size.

For experts, which are parameters with several matrices (``target_parameters``), A has the rows of
all experts, one expert after the other. B has their columns, grouped by column. If two parameters
of a module are adapted, their wrappers are nested, and the names of the first contain
``base_layer``.

If the base's head is tied to its embedding, peft trains a copy of one and leaves the other
unchanged, so that the merged model's head is untied. It stays tied if ``ensure_weight_tying`` is
set, or if only tokens of the embedding were trained.
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
"""Kinds of adapter parameters by the text after ``lora_`` in their peft names."""

EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_ADAPTER = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)(?:\.\w+)??(?:\.weight)?")
_PIECES = {
    "trained": re.compile(r"^(.+)\.modules_to_save(?:\.\w+)??\.(\w+)"),
    "base": re.compile(r"^(.+?)\.(?:original_module|(?:token_adapter\.)?base_layer)\.(\w+)"),
    "tokens": re.compile(r"^(.+)\.token_adapter\.trainable_tokens_delta(?:\.\w+)??()"),
    "A": re.compile(r"^(.+)\.lora_(?:embedding_)?A(?:\.\w+)??(?:\.weight)?()"),
    "B": re.compile(r"^(.+)\.lora_(?:embedding_)?B(?:\.\w+)??(?:\.weight)?()"),
}
"""Name patterns of the stored tensors from which a whole tensor is assembled: the trained values,
the base's values, trained rows, or the matrices of an adapter."""


class Place(NamedTuple):
    """Location of an adapter: its layer by canonical name, and its Hugging Face module."""

    layer: str
    target: ModuleTarget

    def name(self, kind: str) -> str:
        """Return the canonical name of an adapter parameter. ``kind`` is a, b or magnitude."""
        part = f"{self.target.part}_" if self.target.part else ""
        return f"{self.layer}.lora_{part}{kind}"

    def to_peft(self, values: Tensor, kind: str) -> Tensor:
        """Convert one of the adapter's parameters to peft's layout."""
        values = values if kind == "a" else self.target.rows_to_hf(values)
        if self.target.stacked:  # [E, r, I] to [E r, I], and [E, O, r] to [O, r E]
            values = values.flatten(0, 1) if kind == "a" else values.permute(1, 2, 0).flatten(1)
        return values.contiguous()

    def from_peft(self, values: Tensor, kind: str, experts: int) -> Tensor:
        """Convert a parameter from peft's layout: the inverse of :meth:`to_peft`."""
        if self.target.stacked and kind == "a":
            values = values.unflatten(0, (experts, -1))
        elif self.target.stacked:
            values = values.unflatten(1, (-1, experts)).permute(2, 0, 1)
        return values.contiguous() if kind == "a" else self.target.rows_from_hf(values)


def places(model: ModelConfig) -> dict[str, Place]:
    """Return the linear modules of all blocks of a model, by their Hugging Face names."""
    stacks = architecture_of(model).stacks
    return {
        target.module.format(n=n): Place(target.layer.format(n=n), target)
        for target in linear_targets(model)
        for n in range(stacks[target.layer.partition(".{n}.")[0]](model))
    }


def wrappers(targets: Mapping[str, Place], parameters: Sequence[str]) -> dict[str, str]:
    """Return the names of peft's wrapper modules, by the name of what each wraps: linear modules,
    and parameters whose names have one of the endings ``parameters``."""
    names: dict[str, str] = {}
    for name, place in reversed([*targets.items()]):
        if not place.target.stacked:
            names[name] = name
        elif any(ends(name, ending) for ending in parameters):
            module = name.rpartition(".")[0]
            names[name] = f"{module}.base_layer" if module in names.values() else module
    return {name: names[name] for name in targets if name in names}


def ends(module: str, ending: str) -> bool:
    """Return whether a module's name ends with these components, as peft selects modules."""
    return f".{module}".endswith(f".{ending}")


class PeftTensors(DerivedSource):
    """Tensors of a folder in peft's format by canonical name, float32, with this project's row
    order. ``model`` is the merged model's configuration. Raises CheckpointError if a tensor is
    unknown, or if the folder does not fit its base.

    Args:
        content: contents of adapter_config.json.
        scale: function that returns the scaling factor for a module and a rank.
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
            # If a tensor is stored with and without a wrapper in its name, the values are the same.
            pieces = self._pieces.setdefault(theirs, {})
            if piece not in pieces or name != theirs:
                pieces[piece] = key

    def _piece_of(self, name: str) -> tuple[str, str]:
        """Return the name of the whole tensor to which a stored tensor belongs, and the stored
        tensor's key in :data:`_PIECES`."""
        for piece, form in _PIECES.items():
            if match := form.fullmatch(name):
                return f"{match[1]}.{match[2] or 'weight'}", piece
        saved = self._content.get("modules_to_save") or []
        module = name.rpartition(".")[0]
        return name, "trained" if any(module.endswith(each) for each in saved) else "base"

    def _merged(self) -> ModelConfig:
        """Return the base's configuration with the file's vocabulary size, untied if necessary."""
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
        """Return whether the head of a tied base stays tied in the merged model, as in peft."""
        here, there = (self._pieces.get(name, {}) for name in (self._embedding, self._head))
        # Even then, peft unties embeddings with any other name.
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
        """Return the number of stacked matrices in an adapter's parameter, or 1 without a stack."""
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
        """Return a tensor of the merged model, by its Hugging Face name."""
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
        """Return a Hugging Face tensor of the base, preferably the copy in the adapters' file."""
        pieces = self._pieces.get(theirs, {})
        if "base" in pieces:
            return self._read(pieces["base"])
        if theirs == self._head and self._base.model.embedding.tied:
            return self._of_base(self._embedding)
        parameter = next(each for each in self._before.values() if theirs in each.theirs)
        return parameter.to_hf(self._base.tensor(parameter.ours))[theirs]

    def _addition(self, theirs: str, values: Tensor) -> Tensor:
        """Return the low-rank addition to an embedding or head, scaled like peft's."""
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
            # A tied head uses the embedding's indices.
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
    """Tensor in a file that is read on demand."""

    shape: tuple[int, ...]
    tensor: Callable[[], Tensor]


def _opened(path: Path) -> Mapping[str, _Tensor]:
    """Return the tensors of a file by key."""
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
    """Return the name of the head's tensor in Hugging Face files, or an empty string if the head is
    not a language model's."""
    names = (each.theirs[0] for each in _parameters(_untied(model)) if each.ours == _HEAD)
    return next(names, "")


def module_name(theirs: str) -> str:
    """Return a tensor's name in a model of transformers 5, given its name in checkpoint files. The
    names differ for GPT-NeoX's head."""
    rest = theirs.removeprefix("embed_out")
    return theirs if rest == theirs else f"lm_head{rest}"


def _parameters(model: ModelConfig) -> list[Parameter]:
    return list(architecture_of(model).parameters(model))
