"""Vectors of an encoder of transformers, or of a folder of sentence-transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.apps.retro.embedding import readable
from megatron.apps.retro.embedding.config import EmbedderFlags
from megatron.apps.retro.embedding.identity import weights_digest
from megatron.apps.retro.embedding.sentence_modules import (
    LIST,
    SentenceModules,
    read_modules,
)
from megatron.apps.retro.embedding.token_batches import (
    BatchedEncoder,
    TokenBatch,
    mean_inside,
)
from megatron.config import ConfigError, PrecisionConfig, Settings
from megatron.config.flags import build
from megatron.engine.environment import training_device
from megatron.tokenizer.transformers_folder import hide_bars_of_transformers, load_folder
from megatron.util.digests import digest

_POOLER = "pooler."
"""Parameters that the last hidden states do not depend on; many files lack them."""


class TransformersEmbedder:
    """A text's vector is the mean of the last hidden states of its tokens, without the special ones
    around it; in a folder of sentence-transformers what its modules make of all of them."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        modules: SentenceModules | None,
        batch_size: int,
        max_length: int,
    ) -> None:
        """``max_length`` are the tokens that are read of a text, special ones included."""
        self._model, self._tokenizer, self._modules = model, tokenizer, modules
        self._before, self._after = _around(tokenizer)
        device = next(model.parameters()).device
        probe = torch.tensor([[*self._before, 0, *self._after]], device=device)
        with torch.inference_mode():
            lengths_B = torch.tensor([probe.shape[1]], device=device)
            self.width = self._vectors(TokenBatch(np.zeros(1, int), probe, lengths_B)).shape[1]
        self._encoder = BatchedEncoder(
            self._vectors,
            self.width,
            self._before,
            self._after,
            most=max_length,
            size=batch_size,
            pad=tokenizer.pad_token_id or 0,
            device=device,
        )
        read = {n: w for n, w in model.named_parameters() if not n.startswith(_POOLER)}
        read |= {} if modules is None else modules.weights
        self.identity: Mapping[str, Any] = {
            "type": "huggingface",
            "model": digest(json.dumps(_computed(model.config), sort_keys=True)),
            "weights": weights_digest(read.items()),
            "modules": None if modules is None else modules.description,
            "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
            "max_length": max_length,
        }

    def lengths(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """See :class:`~megatron.apps.retro.embedding.Embedder`."""
        return np.array([len(row) for row in self._tokens(texts)], np.int64)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """See :class:`~megatron.apps.retro.embedding.Embedder`."""
        prompt = "" if self._modules is None else self._modules.prompt
        return self._encoder.embed(self._tokens(texts, prompt))

    def _tokens(self, texts: Sequence[str], prompt: str = "") -> list[list[int]]:
        texts = [readable(text) for text in texts]
        texts = [prompt + text if text.strip() else "" for text in texts]
        if self._modules is not None and self._modules.lower_case:
            texts = [text.lower() for text in texts]
        if not texts:
            return []
        found = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return found["input_ids"]  # type: ignore[no-any-return]

    def _vectors(self, batch: TokenBatch) -> Tensor:
        mask_BS = batch.kept_BS if batch.padded else None
        found = self._model(input_ids=batch.tokens_BS, attention_mask=mask_BS)
        states_BSH, lengths_B = found.last_hidden_state, batch.lengths_B
        if self._modules is not None:
            return self._modules.vectors(states_BSH, lengths_B)
        return mean_inside(states_BSH, lengths_B, len(self._before), len(self._after))


def build_transformers_embedder(config: EmbedderFlags, settings: Settings) -> TransformersEmbedder:
    """The embedder of the folder ``--bert-load``, or else ``--load``; nothing is downloaded, and
    code in the folder is not run. Raises ConfigError, naming flag and folder, if it cannot be
    used."""
    given = settings.get("load")
    folder = config.bert_load or (None if given is None else given.value)
    if folder is None:
        raise ConfigError(
            "--bert-embedder-type huggingface needs --bert-load, the folder of an encoder of "
            "transformers or of sentence-transformers"
        )
    flag = f"{'--bert-load' if config.bert_load else '--load'} {folder}"
    if not Path(folder, "config.json").is_file() and not Path(folder, LIST).is_file():
        raise ConfigError(
            f"{flag} must be a folder with config.json or {LIST}: an encoder of transformers or of "
            "sentence-transformers"
        )
    device, precision = training_device(), build(PrecisionConfig, settings)
    try:
        modules = None
        if Path(folder, LIST).is_file():
            modules = read_modules(Path(folder), flag, device)
        path = Path(folder) if modules is None else modules.encoder
        tokenizer = _tokenizer(path)
        model = _encoder(path, dtype_of(precision), flag)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        said = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"{flag} cannot be read as an encoder of transformers: {said}; name a folder with "
            "config.json, the weights and the tokenizer"
        ) from error
    longest = [config.retro_bert_max_chunk_length, tokenizer.model_max_length, _positions(model)]
    if modules is not None and modules.max_length is not None:
        longest.append(modules.max_length)
    return TransformersEmbedder(
        model.to(device), tokenizer, modules, config.retro_bert_batch_size, min(longest)
    )


def dtype_of(precision: PrecisionConfig) -> torch.dtype:
    """Of the weights: float32 unless a flag asks for 16 bits."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def _tokenizer(folder: Path) -> Any:
    tokenizer = load_folder(folder, "the tokenizer in")
    if not tokenizer.is_fast:
        raise ValueError(f"{folder} has no tokenizer.json")
    return tokenizer


def _encoder(folder: Path, dtype: torch.dtype, flag: str) -> Any:
    """The model without a head, of an encoder and decoder the encoder. ConfigError if the files
    lack weights, which transformers would fill with random numbers."""
    from transformers import AutoModel
    from transformers.utils import logging

    # Its table of unused heads says nothing to whoever embeds.
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    hide_bars_of_transformers()
    try:
        model, report = AutoModel.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(before)
    whole = model.config.is_encoder_decoder
    unused = (_POOLER, "decoder.") if whole else (_POOLER,)
    missing = [name for name in sorted(report["missing_keys"]) if not name.startswith(unused)]
    if missing:
        raise ConfigError(
            f"{flag}: the files lack {len(missing)} of the encoder's weights, such as {missing[0]}"
        )
    return (model.get_encoder() if whole else model).eval().requires_grad_(False)


def _computed(config: Any) -> dict[str, Any]:
    """The settings of a model without what says where it is from."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    unused = ("_name_or_path", "transformers_version", "architectures")
    return {name: value for name, value in found.items() if name not in unused}


def _positions(model: Any) -> int:
    """Tokens that there are positions for; a large number without a limit."""
    table = next(
        (m for name, m in model.named_modules() if name.endswith("position_embeddings")), None
    )
    if not isinstance(table, torch.nn.Embedding):
        return sys.maxsize
    # RoBERTa's positions begin after its padding.
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    whole = tokenizer("a")["input_ids"]
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    raise ValueError("its tokenizer changes a text where it adds special tokens")
