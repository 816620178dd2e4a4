"""Embedder that runs a BERT with this project's layers, from any supported checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.apps.retro.config import EmbedderFlags
from megatron.apps.retro.embedding.encoder import (
    EncoderEmbedder,
    TokenBatch,
    mean_inside,
    readable,
    weights_digest,
)
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint, nothing_at
from megatron.config import (
    ConfigError,
    ModelFlags,
    PrecisionConfig,
    Setting,
    Settings,
    TokenizerConfig,
)
from megatron.config.flags import names_of
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint
from megatron.families import spec_of
from megatron.features.evaluation.checkpoints import (
    checkpoint_settings,
    evaluated_run,
    evaluation_settings,
)
from megatron.features.evaluation.evaluator import Evaluator, build_evaluator
from megatron.features.masked.heads import LabelledBatch
from megatron.parallel.mesh import Mesh
from megatron.tokenizer import Tokenizer
from megatron.util.digests import digest, digest_of_parts

_USED = {
    *(
        field.name
        for flags in (ModelFlags, TokenizerConfig, PrecisionConfig)
        for field in dataclasses.fields(flags)
    ),
    *("family", "load", "load_tag", "use_checkpoint_args"),
}
"""Training flags that describe a model, its tokenizer and its checkpoint."""
_OF_HEADS = {"head", "num_labels", "label_names", "bert_binary_head", "lm_head_activation"}
_OWN = {
    # Batch shapes vary too much for compilation.
    "torch_compile": Setting("off", "this program"),
    # This head accepts texts without pretraining targets. It is not run.
    "head": Setting("span", "this program"),
}


class MegatronEmbedder(EncoderEmbedder):
    """Embedder that averages a BERT's last hidden states between [CLS] and [SEP]."""

    def __init__(
        self, engine: Evaluator, tokenizer: Tokenizer, batch_size: int, max_length: int
    ) -> None:
        """``max_length`` is the maximum number of tokens read of a text, with special tokens."""
        self._begin, self._tokenizer = engine.spec.begin, tokenizer
        model, heads = engine.config.model, engine.spec.head_parts
        positions = model.positions
        if positions.position_embedding_type == "learned_absolute":
            max_length = min(max_length, positions.max_position_embeddings)
        norm = [layer.name for layer in engine.layers].index("final_norm")
        self._layers = engine.sequences[0].part(0, norm + 1)
        self.width, self.device = model.hidden_size, engine.device
        self.before, self.after, self.pad = [tokenizer.cls], [tokenizer.sep], tokenizer.pad
        self.most, self.size = max_length, batch_size
        weights = [(name, w) for w, name in engine.names.items() if not name.startswith(heads)]
        self.identity = {
            "type": "megatron",
            "model": digest(json.dumps(_computed(model.flags()), sort_keys=True)),
            "weights": weights_digest(weights),
            "tokenizer": _tokenizer_digest(tokenizer),
            "max_length": max_length,
        }

    def tokens(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        return self._tokenizer.tokenize_sentences([readable(text) for text in texts])

    def vectors(self, batch: TokenBatch) -> Tensor:
        inputs = LabelledBatch(
            batch.tokens_BS,
            types_BS=torch.zeros_like(batch.tokens_BS),
            padding_mask_BS=batch.kept_BS,
            labels_B=torch.zeros_like(batch.lengths_B),
            padded=batch.padded,
        )
        state = self._layers(self._begin(inputs))
        return mean_inside(state.total, batch.lengths_B)


def build_megatron_embedder(config: EmbedderFlags, settings: Settings) -> MegatronEmbedder:
    """Return the embedder of ``--bert-load``, or else ``--load``. It runs in a single process,
    whatever the layout in the checkpoint. Raises ConfigError, CheckpointError or OSError, naming
    the flag and file, if one cannot be used."""
    described = _bert_settings(config, settings)
    checkpoint = _checkpoint(described)
    used, _ = evaluation_settings(checkpoint_settings(described))
    run = evaluated_run(used, processes=1)
    engine = build_evaluator(run.config, spec_of(run.config.model), Mesh(), training_device())
    load_checkpoint(engine, checkpoint, weights_only=True)
    return MegatronEmbedder(
        engine, run.tokenizer, config.retro_bert_batch_size, config.retro_bert_max_chunk_length
    )


def _checkpoint(settings: Settings) -> FoundCheckpoint:
    load = settings["load"]
    flag = f"{load.origin.removeprefix('flag ')} {load.value}"
    tag = settings["load_tag"].value if "load_tag" in settings else None
    checkpoint = locate_checkpoint(load.value, tag)
    if checkpoint is None:
        raise ConfigError(f"{flag}: {nothing_at(load.value)}; name the folder of a BERT's")
    if checkpoint.family != "bert":
        raise ConfigError(
            f"{flag} is a model of the family {checkpoint.family}, and a BERT embeds chunks; name "
            "one, or choose another --bert-embedder-type"
        )
    return checkpoint


def _bert_settings(config: EmbedderFlags, settings: Settings) -> Settings:
    """Return the settings that describe the BERT: the training flags, overridden by the embedder's
    flags."""
    used = {name: setting for name, setting in settings.items() if name in _USED}
    for name, flag, value in (
        ("load", "--bert-load", config.bert_load),
        ("vocab_file", "--retro-bert-vocab-file", config.retro_bert_vocab_file),
        ("tokenizer_type", "--retro-bert-tokenizer-type", config.retro_bert_tokenizer_type),
    ):
        if value is not None:
            used[name] = Setting(value, f"flag {flag}")
    if "load" not in used:
        raise ConfigError(
            "--bert-embedder-type megatron needs --bert-load, the checkpoint of a BERT; "
            "--bert-embedder-type hashing needs no model"
        )
    return used | _OWN


def _computed(flags: ModelFlags) -> dict[str, Any]:
    """Return the model flags that affect the embeddings. Flags of output heads are left out."""
    names = {*names_of("weights", ModelFlags), *names_of("results", ModelFlags)} - _OF_HEADS
    return {name: getattr(flags, name) for name in names}


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of the vocabulary and of a tokenized sample text, which shows how the
    tokenizer treats case, accents and spaces."""
    special = tokenizer.cls, tokenizer.sep, tokenizer.pad
    shown = tokenizer.tokenize_sentences(["An Example: Café  naïve 力加 don't\n1,234 x_y"])[0]
    vocabulary = b"\0".join(tokenizer.token_bytes)
    return digest_of_parts([vocabulary, f"{special} {shown.tolist()}"])
