"""Tasks of the models of `transformers`: their descriptions in folders, and the inputs and outputs
that are compared with ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.model.layer_list import LayerState

_LONGEST_WINDOW = 1024
"""Sequences are longer than sliding windows of up to this many tokens."""


class Inputs(NamedTuple):
    """The same micro batch for both: the state to begin with, and arguments of `forward`.

    ``counted`` [B, S] says which positions are compared; None for all."""

    ours: LayerState
    theirs: Mapping[str, Tensor]
    counted: Tensor | None = None


class Task(ABC):
    """The task of an architecture's models: inputs, outputs and description."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Keys that config.json has in addition."""
    unit: ClassVar[str] = "tokens"
    """Unit that has logits."""
    generates: ClassVar[bool] = False
    """True if a folder has a generation_config.json."""

    @abstractmethod
    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Random tokens, at the first and at the last positions of the model."""

    @abstractmethod
    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        """Our logits after the last layer, without padding of the vocabulary, by their name in the
        output of `transformers`."""

    def count(self, logits: Tensor) -> int:
        """Return the number of :attr:`unit` in the compared logits."""
        return logits.shape[:-1].numel()

    @abstractmethod
    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        """Keys of config.json about tokens; ``tokenizer`` is an object of `transformers`."""

    @abstractmethod
    def end_only(self, source: Source) -> dict[str, Any]:
        """The same keys where there is no tokenizer, and at most one token is known."""

    def fit_tokenizer(self, folder: Path, tokenizer: Any) -> bool:
        """Change a tokenizer's files so that it tokenizes texts as in the model's training. Return
        True if files changed. ``tokenizer`` is an object of `transformers`."""
        return False


class CausalLM(Task):
    """A decoder that predicts the next token."""

    settings: ClassVar[Mapping[str, Any]] = {"use_cache": True}
    generates = True

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        # Without absolute positions their code accepts none.
        relative = model.positions.position_embedding_type in ("alibi", "none")
        # Longrope's angles depend on the length of the sequence in our code, and on the last
        # position in theirs.
        scaling = model.positions.rope_scaling
        longrope = scaling.rope_type == "longrope"
        length, last = compared_length(model), model.positions.max_position_embeddings
        if scaling.long_mscale is not None:
            # transformers 5 takes the frequencies of short sequences for long ones too.
            length = min(length, scaling.original_max_position_embeddings or length)
        random = torch.Generator().manual_seed(seed)
        tokens_BS = torch.randint(model.vocabulary.size, (2, length), generator=random)
        second = 0 if longrope or relative else last - length
        positions_BS = torch.tensor([[0], [second]]) + torch.arange(length)
        theirs = {"input_ids": tokens_BS} | ({} if relative else {"position_ids": positions_BS})
        return Inputs(LayerState(tokens_BS, position_ids=positions_BS), theirs)

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        return {"logits": state.hidden[..., : model.vocabulary.size]}

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        # Documents begin where the last one ended, so the end stands in for a missing beginning.
        return {"bos_token_id": end if begin is None else begin, "eos_token_id": end}

    def end_only(self, source: Source) -> dict[str, Any]:
        return {"bos_token_id": source.end_of_text, "eos_token_id": source.end_of_text}


def compared_length(model: ModelConfig) -> int:
    """Tokens of a sequence that is compared: more than a sliding window, if the model has them."""
    length, window = 128, model.attention.sliding_window
    if window is not None and window <= _LONGEST_WINDOW:
        length = max(length, window + 64)
    return min(length, model.positions.max_position_embeddings)


CAUSAL_LM = CausalLM()


class RewardTask(CausalLM):
    """A decoder that scores a text's quality."""

    settings: ClassVar[dict[str, Any]] = {}
    unit = "texts"
    generates = False

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """One text at a time: of several they ask for a token of padding."""
        plain = super().inputs(model, seed)
        ours, theirs = plain.ours, dict(plain.theirs)
        positions = ours.position_ids
        assert positions is not None
        return Inputs(
            ours.changed(hidden=ours.hidden[1:], position_ids=positions[1:]),
            {name: values[1:] for name, values in theirs.items()},
        )

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        return {"logits": state.hidden[:, -1]}

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        """The token of padding too, after which they look for the last token of a text; none where
        it is the end of every text."""
        tokens = super().special_tokens(tokenizer, source)
        pad = tokenizer.pad_token_id
        if pad is not None and pad != tokenizer.eos_token_id:
            tokens["pad_token_id"] = pad
        return tokens


REWARD = RewardTask()


_REWARD_CLASS = "ForSequenceClassification"
"""End of the class of a reward model: a causal decoder with a head of one label."""
REWARD_KEYS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def has_rewards(model: ModelConfig) -> bool:
    return model.head == "reward"


def reward_class(causal: str) -> str:
    """The class of reward models, from the name of the class of causal language models."""
    prefix = causal.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    text = "Text" if prefix in ("Gemma3", "Qwen3_5") else ""  # of which others see images
    return f"{prefix}{text}{_REWARD_CLASS}"


def read_head(given: HFConfigReader) -> dict[str, Any]:
    """The flags of a causal decoder's head. Raises CheckpointError if it has several labels."""
    classes = given.names("architectures") or []
    if not any(name.endswith(_REWARD_CLASS) for name in classes):
        return {}
    labels = len(given.table("id2label")) or given.content.get("num_labels") or 2
    if labels != 1:
        given.refuse(
            "architectures", classes, f"it has {labels} labels; a reward model has one (num_labels)"
        )
    return {"head": "reward"}
