"""A model of Hugging Face as a checkpoint: its weights, whole, with canonical names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig, TokenizerConfig
from megatron.families import build_model
from megatron.formats.huggingface.registry import architecture_named
from megatron.formats.huggingface.table import Architecture, Parameter
from megatron.formats.huggingface.weights import WeightFiles, weights_of
from megatron.parallel.shard import shard_of

TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""Files of which one at least makes a tokenizer."""
_BESIDE_TOKENIZER = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_BUFFERS = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|(attn|attention|self_attn|self_attention)\.(bias|masked_bias))"
)
"""Tensors that older files hold although they follow from the configuration."""


class HuggingFaceFolder(Source):
    """A folder with config.json and weights, for a model of one of the known architectures.

    Args:
        folder: the folder.

    Attributes:
        architecture: which one.

    Raises:
        CheckpointError: a file is missing or damaged, tensors are missing, superfluous or of
            another shape, or config.json says what cannot be represented here.
    """

    title = "model of Hugging Face"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = folder / "config.json"
        content = read_json(config)
        if not isinstance(content, dict):
            raise CheckpointError(f"{config} is no JSON object")
        self.architecture: Architecture = architecture_named(content, config)
        self.model: ModelConfig = self.architecture.model(content, config)
        self._weights = WeightFiles(folder)
        parameters = list(self.architecture.parameters(self.model))
        self._parameters: dict[str, Parameter] = {each.ours: each for each in parameters}
        self._stored = self._match(parameters)
        self._shapes = _shapes(self.model)
        self._check_shapes()
        if self._has_tokenizer():
            self.tokenizer = TokenizerConfig(
                tokenizer_type="HFTokenizer", tokenizer_model=str(folder)
            )

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """See :meth:`Source.locate`."""
        config = path / "config.json"
        if not config.is_file():
            return None
        if weights_of(path) is None:
            content = read_json(config)
            if not isinstance(content, dict) or "model_type" not in content:
                return None
        if wanted is not None:
            raise CheckpointError(f"{path} is a model of Hugging Face, and has no {wanted}")
        return path

    def names(self) -> Sequence[str]:
        """See :meth:`Source.names`."""
        return list(self._parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :meth:`Source.shape`."""
        return self._shapes[self._known(name)]

    def kinds(self, name: str) -> Sequence[str]:
        """Weights alone."""
        self._known(name)
        return ["weight"]

    def dtype(self, name: str, kind: str = "weight") -> str:
        """See :meth:`Source.dtype`."""
        first = self._parameters[self._known(name)].theirs[0]
        return str(self._weights.dtype(self._stored[first])).removeprefix("torch.")

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """See :meth:`Source.tensor`."""
        parameter = self._parameters[self._known(name)]
        if kind != "weight":
            raise CheckpointError(f"{self.folder} has no {kind} of {name}, only weights")
        parts = [self._weights.tensor(self._stored[theirs]) for theirs in parameter.theirs]
        return parameter.from_hf([part.float() for part in parts])

    def copy_tokenizer(self, target: Path) -> bool:
        """See :meth:`Source.copy_tokenizer`; generation_config.json goes with it."""
        if not self._has_tokenizer():
            return False
        target.mkdir()
        for name in (*TOKENIZER, *_BESIDE_TOKENIZER):
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)
        return True

    def _has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in TOKENIZER)

    def _known(self, name: str) -> str:
        if name not in self._parameters:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return name

    def _match(self, parameters: Sequence[Parameter]) -> dict[str, str]:
        """Name in the files of each tensor of the table.

        Files that were saved without a head lack the first part of the names.
        """
        files, prefix = self._weights.files, self.architecture.base_prefix
        bare = not any(name.startswith(prefix) for name in files)
        stored, missing = {}, []
        for theirs in (name for parameter in parameters for name in parameter.theirs):
            spellings = [theirs.removeprefix(prefix) if bare else theirs]
            if theirs == "embed_out.weight":
                spellings.append("lm_head.weight")
            found = next((name for name in spellings if name in files), None)
            if found is None:
                missing.append(theirs)
            else:
                stored[theirs] = found
        if missing:
            raise CheckpointError(
                f"{self._weights.path} lacks {_some(missing)}; a model ({self.architecture.title}) "
                f"as {self.folder / 'config.json'} describes it has them"
            )
        foreign = sorted(set(files) - set(stored.values()))
        foreign = [name for name in foreign if not _BUFFERS.fullmatch(name)]
        foreign = [name for name in foreign if not self._is_tied_head(name, stored)]
        if foreign:
            raise CheckpointError(
                f"{self._weights.path} holds {_some(foreign)}; a model ({self.architecture.title}) "
                f"as {self.folder / 'config.json'} describes it has no such tensors"
            )
        return stored

    def _is_tied_head(self, name: str, stored: dict[str, str]) -> bool:
        """Whether it is the head of a model that uses the token table for it: a copy of it."""
        if name not in ("lm_head.weight", "embed_out.weight") or not self.model.embedding.tied:
            return False
        (table,) = self._parameters["embedding.word_embeddings.weight"].theirs
        if torch.equal(self._weights.tensor(name), self._weights.tensor(stored[table])):
            return True
        raise CheckpointError(
            f"{self._weights.files[name]}: {name} differs from {stored[table]}, but "
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
                found = self._weights.shape(self._stored[theirs])
                if found != tuple(like.shape):
                    raise CheckpointError(
                        f"{self._weights.files[self._stored[theirs]]}: {theirs} has the shape "
                        f"{found}; config.json makes it {tuple(like.shape)}"
                    )


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of the network, by canonical name."""
    with torch.device("meta"):
        network = build_model(model)
    return {name: shard_of(param).canonical_shape for name, param in network.canonical_parameters()}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
