"""Embedder that runs an encoder of transformers, or a sentence-transformers folder.

In a sentence-transformers folder, ``modules.json`` and the folders listed there define how
embeddings are computed from hidden states. The package sentence-transformers itself is not needed.

Shape suffixes: B texts, S tokens, H hidden, V embedding width.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megatron.apps.retro.config import EmbedderFlags
from megatron.apps.retro.embedding.encoder import (
    EncoderEmbedder,
    TokenBatch,
    mean_inside,
    readable,
    weights_digest,
)
from megatron.config import ConfigError, PrecisionConfig, Settings
from megatron.config.flags import build
from megatron.engine.environment import training_device
from megatron.formats.transformers_folder import load_folder, quiet_transformers
from megatron.formats.unpickle import load_pickle
from megatron.util.digests import digest
from megatron.util.files import read_regular
from megatron.util.json_text import parse_json

_LIST = "modules.json"
_POOLER = "pooler."
"""Prefix of parameters that do not affect the last hidden states. Many files lack them."""
_POOLINGS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}
"""Key of each pooling mode in older versions, which have one key per mode. If several modes are
set, their results are concatenated in this order."""
VectorStep = Callable[[Tensor], Tensor]
"""Function that transforms embeddings [B, V]."""


class TransformersEmbedder(EncoderEmbedder):
    """Embedder that averages the last hidden states of a text's tokens, without the special tokens
    around the text. In a sentence-transformers folder, the modules compute the embedding from all
    tokens instead."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        modules: SentenceModules | None,
        batch_size: int,
        max_length: int,
    ) -> None:
        """``max_length`` is the maximum number of tokens read of a text, with special tokens."""
        self._model, self._tokenizer, self._modules = model, tokenizer, modules
        self.before, self.after = _around(tokenizer)
        self.most, self.size, self.pad = max_length, batch_size, tokenizer.pad_token_id or 0
        self.device = next(model.parameters()).device
        probe = torch.tensor([[*self.before, 0, *self.after]], device=self.device)
        with torch.inference_mode():
            lengths_B = torch.tensor([probe.shape[1]], device=self.device)
            self.width = self.vectors(TokenBatch(np.zeros(1, int), probe, lengths_B)).shape[1]
        weights = {n: w for n, w in model.named_parameters() if not n.startswith(_POOLER)}
        weights |= {} if modules is None else modules.weights
        self.identity = {
            "type": "huggingface",
            "model": digest(json.dumps(_computed(model.config), sort_keys=True)),
            "weights": weights_digest(weights.items()),
            "modules": None if modules is None else modules.description,
            "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
            "max_length": max_length,
        }

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        prompt = "" if self._modules is None else self._modules.prompt
        return self.embed_tokens(self.tokens(texts, prompt))

    def tokens(self, texts: Sequence[str], prompt: str = "") -> list[list[int]]:
        texts = [readable(text) for text in texts]
        texts = [prompt + text if text.strip() else "" for text in texts]
        if self._modules is not None and self._modules.lower_case:
            texts = [text.lower() for text in texts]
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, verbose=False)
        return encoded["input_ids"]  # type: ignore[no-any-return]

    def vectors(self, batch: TokenBatch) -> Tensor:
        mask_BS = batch.kept_BS if batch.padded else None
        output = self._model(input_ids=batch.tokens_BS, attention_mask=mask_BS)
        states_BSH, lengths_B = output.last_hidden_state, batch.lengths_B
        if self._modules is not None:
            return self._modules.vectors(states_BSH, lengths_B)
        return mean_inside(states_BSH, lengths_B, len(self.before), len(self.after))


def build_transformers_embedder(config: EmbedderFlags, settings: Settings) -> TransformersEmbedder:
    """Return the embedder of the folder ``--bert-load``, or else ``--load``. Nothing is downloaded,
    and no code in the folder is run. Raises ConfigError, naming the flag and folder, if it cannot
    be used."""
    given = settings.get("load")
    folder = config.bert_load or (None if given is None else given.value)
    if folder is None:
        raise ConfigError(
            "--bert-embedder-type huggingface needs --bert-load, the folder of an encoder of "
            "transformers or of sentence-transformers"
        )
    flag = f"{'--bert-load' if config.bert_load else '--load'} {folder}"
    if not Path(folder, "config.json").is_file() and not Path(folder, _LIST).is_file():
        raise ConfigError(
            f"{flag} must be a folder with config.json or {_LIST}: an encoder of transformers or "
            "of sentence-transformers"
        )
    device, precision = training_device(), build(PrecisionConfig, settings)
    dtype = torch.float16 if precision.fp16 else torch.float32
    try:
        modules, path = None, Path(folder)
        if (path / _LIST).is_file():
            modules = SentenceModules(path, flag, device)
            path = modules.encoder
        tokenizer = load_folder(path, "the tokenizer in")
        if not tokenizer.is_fast:
            raise ValueError(f"{path} has no tokenizer.json")
        model = _encoder(path, torch.bfloat16 if precision.bf16 else dtype, flag)
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


def _encoder(folder: Path, dtype: torch.dtype, flag: str) -> Any:
    """Return the model without a head, or the encoder of an encoder-decoder. Raises ConfigError if
    the files lack weights, which transformers would otherwise initialise randomly."""
    from transformers import AutoModel

    with quiet_transformers():
        model, report = AutoModel.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    whole = model.config.is_encoder_decoder
    unused = (_POOLER, "decoder.") if whole else (_POOLER,)
    missing = [name for name in sorted(report["missing_keys"]) if not name.startswith(unused)]
    if missing:
        raise ConfigError(
            f"{flag}: the files lack {len(missing)} of the encoder's weights, such as {missing[0]}"
        )
    return (model.get_encoder() if whole else model).eval().requires_grad_(False)


def _computed(config: Any) -> dict[str, Any]:
    """Return the settings of a model, except those that only describe where it comes from."""
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    unused = ("_name_or_path", "transformers_version", "architectures")
    return {name: value for name, value in settings.items() if name not in unused}


def _positions(model: Any) -> int:
    """Return a model's number of positions, or a very large number if it has no limit."""
    table = next(
        (m for name, m in model.named_modules() if name.endswith("position_embeddings")), None
    )
    if not isinstance(table, torch.nn.Embedding):
        return sys.maxsize
    # RoBERTa's positions start after its padding index.
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    whole = tokenizer("a")["input_ids"]
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    raise ValueError("its tokenizer changes a text where it adds special tokens")


class SentenceModules:
    """Modules of a sentence-transformers folder.

    Attributes:
        encoder: folder of the transformer.
        max_length: maximum number of tokens of a text to read; None for no limit.
        prompt: prefix added to each text.
        weights: weights of the steps after pooling, by name.
        description: settings of all modules, as JSON values."""

    def __init__(self, folder: Path, flag: str, device: torch.device) -> None:
        """Read the modules. Raises ConfigError, naming ``flag``, if a module is not supported, and
        OSError or ValueError if a file is missing or malformed."""
        named = _modules(folder, flag)
        (_, self.encoder), (_, pooling), *others = named
        settings = _content(self.encoder / "sentence_bert_config.json")
        self.max_length: int | None = settings.get("max_seq_length")
        self.lower_case = bool(settings.get("do_lower_case"))
        prompts = _content(folder / "config_sentence_transformers.json")
        name = prompts.get("default_prompt_name")
        self.prompt = "" if name is None else str((prompts.get("prompts") or {})[name])
        self._poolings = _poolings(_content(pooling / "config.json"), f"{flag}/{pooling.name}")
        self._steps: list[VectorStep] = []
        self.weights: dict[str, Tensor] = {}
        for kind, part in others:
            if kind == "Normalize":
                self._steps.append(F.normalize)
            elif kind == "Dense":
                weights = {name: tensor.to(device) for name, tensor in _tensors(part).items()}
                step = _dense(_content(part / "config.json"), weights, f"{flag}/{part.name}")
                self._steps.append(step)
                self.weights |= {f"{part.name}.{name}": each for name, each in weights.items()}
            else:
                raise ConfigError(
                    f"{flag}/{_LIST} has a module {kind}; Transformer, Pooling, Dense and "
                    "Normalize are what can be used"
                )
        described = ([kind, _content(part / "config.json")] for kind, part in named[1:])
        self.description = [settings, self.prompt, *described]

    def vectors(self, states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
        """Return the embeddings [B, V] of texts, given their hidden states."""
        pooled = [_pooled(name, states_BSH, lengths_B) for name in self._poolings]
        vectors_BV = torch.cat(pooled, 1)
        for step in self._steps:
            vectors_BV = step(vectors_BV)
        return vectors_BV


def _modules(folder: Path, flag: str) -> list[tuple[str, Path]]:
    """Return the kind and folder of each module that a sentence-transformers folder lists."""
    entries = parse_json(read_regular(folder / _LIST), f"{flag}: {folder / _LIST}", lenient=True)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError(
            f"{flag}: {folder / _LIST} is not a list of modules, each with its type and the path "
            "of a folder next to it"
        )
    kinds = [entry["type"].rpartition(".")[2] for entry in entries]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ConfigError(
            f"{flag}/{_LIST} begins with {', '.join(kinds[:2])}; a Transformer and its Pooling are "
            "what can be used"
        )
    return [(kind, folder / entry["path"]) for kind, entry in zip(kinds, entries, strict=True)]


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        return False
    path = entry.get("path")
    return isinstance(path, str) and not set("/\\") & set(path) and path != ".."


def _content(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, or an empty dictionary if the file does not exist."""
    if not path.is_file():
        return {}
    content = parse_json(read_regular(path), str(path), lenient=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _poolings(settings: dict[str, Any], where: str) -> Sequence[str]:
    named = settings.get("pooling_mode")
    if named is None:
        old = [n for n, key in _POOLINGS.items() if settings.get(f"pooling_mode_{key}")]
        named = old or ["mean"]
    names: Sequence[str] = [named] if isinstance(named, str) else named
    unknown = [name for name in names if name not in _POOLINGS]
    if unknown or settings.get("include_prompt") is False:
        shown = f"pooling_mode {unknown[0]}" if unknown else "include_prompt false"
        raise ConfigError(
            f"{where}/config.json: {shown} cannot be used; poolings are {', '.join(_POOLINGS)}, of "
            "the prompt, too"
        )
    return names


def _pooled(name: str, states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the pooled hidden states of texts, [B, H]. Texts must be padded on the right."""
    if name == "cls":
        return states_BSH[:, 0]
    if name == "lasttoken":
        return states_BSH[torch.arange(len(lengths_B), device=lengths_B.device), lengths_B - 1]
    places_S = torch.arange(1, states_BSH.shape[1] + 1, device=states_BSH.device)
    kept_BS = places_S <= lengths_B[:, None]
    if name == "max":
        return states_BSH.masked_fill(~kept_BS[..., None], -torch.inf).amax(1)
    weights_BS, sums_B = kept_BS.to(states_BSH.dtype), lengths_B
    if name == "mean_sqrt_len_tokens":
        sums_B = lengths_B.to(states_BSH.dtype).sqrt()
    elif name == "weightedmean":
        weights_BS = places_S.to(states_BSH.dtype) * weights_BS
        sums_B = weights_BS.sum(1)
    return torch.einsum("bs,bsh->bh", weights_BS / sums_B[:, None], states_BSH)


def _dense(settings: dict[str, Any], weights: dict[str, Tensor], where: str) -> VectorStep:
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = getattr(torch.nn, name.rpartition(".")[2], None)
    if not name.startswith("torch.nn.") or kind is None or settings.get("use_residual"):
        shown = "use_residual" if settings.get("use_residual") else f"activation_function {name}"
        raise ConfigError(
            f"{where}/config.json: {shown} cannot be used; activations are those of torch.nn, "
            "without a residual"
        )
    activation = kind()
    weight, bias = weights["linear.weight"], weights.get("linear.bias")
    return lambda vectors_BV: activation(F.linear(vectors_BV, weight.to(vectors_BV), bias))


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    if path.is_file():
        return load_file(path)
    tensors: dict[str, Tensor] = load_pickle(folder / "pytorch_model.bin")
    return tensors
