"""Tasks of `transformers` models, such as predicting the next token. A task determines which keys a
folder has for a model, and which inputs and outputs are compared with ours."""

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
"""Maximum sliding window, in tokens, for which compared sequences are longer than the window."""


class Inputs(NamedTuple):
    """One micro batch for two models: the initial state for ours, and the arguments of ``forward``
    for the model of `transformers`.

    ``counted`` [B, S] is True at the positions to compare; None means all."""

    ours: LayerState
    theirs: Mapping[str, Tensor]
    counted: Tensor | None = None


class Task(ABC):
    """Base class of the tasks that a model can have. It provides the inputs and outputs to compare,
    and the task's keys in a folder."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Additional keys of config.json."""
    unit: ClassVar[str] = "tokens"
    """Unit in which compared logits are counted, for messages."""
    generates: ClassVar[bool] = False
    """True if models with this task have a generation_config.json."""

    @abstractmethod
    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Return inputs with random tokens at the model's first and last positions."""

    @abstractmethod
    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        """Return our logits after the last layer, without vocabulary padding. Their keys are the
        names in the output of `transformers`."""

    def count(self, logits: Tensor) -> int:
        """Return the number of :attr:`unit` that the compared logits cover."""
        return logits.shape[:-1].numel()

    @abstractmethod
    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        """Return config.json's keys for special tokens. ``tokenizer`` is from `transformers`."""

    @abstractmethod
    def end_only(self, source: Source) -> dict[str, Any]:
        """Return config.json's keys for special tokens if there is no tokenizer. At most the
        end-of-text token is known in this case."""

    def fit_tokenizer(self, folder: Path, tokenizer: Any) -> bool:
        """Edit a tokenizer's files so that texts are tokenized as in the model's training. Return
        whether any file changed. ``tokenizer`` is the one that `transformers` loads from
        ``folder``."""
        return False


class CausalLM(Task):
    """Task of decoders that predict the next token."""

    settings: ClassVar[Mapping[str, Any]] = {"use_cache": True}
    generates = True

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        # Models without absolute positions do not accept position_ids.
        relative = model.positions.position_embedding_type in ("alibi", "none")
        # LongRoPE depends on the sequence length in our code, and on the last position in theirs.
        scaling = model.positions.rope_scaling
        longrope = scaling.rope_type == "longrope"
        length, last = compared_length(model), model.positions.max_position_embeddings
        if scaling.long_mscale is not None:
            # transformers 5 uses the frequencies for short sequences in long ones too.
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
        # Documents begin where the last one ended, so the end token also serves as the beginning.
        return {"bos_token_id": end if begin is None else begin, "eos_token_id": end}

    def end_only(self, source: Source) -> dict[str, Any]:
        return {"bos_token_id": source.end_of_text, "eos_token_id": source.end_of_text}


def compared_length(model: ModelConfig) -> int:
    """Return the number of tokens in a sequence to compare. It exceeds the sliding window, unless
    that is longer than ``_LONGEST_WINDOW``."""
    length, window = 128, model.attention.sliding_window
    if window is not None and window <= _LONGEST_WINDOW:
        length = max(length, window + 64)
    return min(length, model.positions.max_position_embeddings)


CAUSAL_LM = CausalLM()


class RewardTask(CausalLM):
    """Task of reward models: decoders that score the quality of a text."""

    settings: ClassVar[dict[str, Any]] = {}
    unit = "texts"
    generates = False

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Return a single text, because `transformers` requires a padding token for several
        texts."""
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
        """Return config.json's keys for special tokens, including the padding token, with which
        `transformers` finds a text's last token. A padding token that equals the end token is
        omitted."""
        tokens = super().special_tokens(tokenizer, source)
        pad = tokenizer.pad_token_id
        if pad is not None and pad != tokenizer.eos_token_id:
            tokens["pad_token_id"] = pad
        return tokens


REWARD = RewardTask()


_REWARD_CLASS = "ForSequenceClassification"
"""Class name suffix of reward models, which are causal decoders with a one-label head."""
REWARD_KEYS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def has_rewards(model: ModelConfig) -> bool:
    return model.head == "reward"


def reward_class(causal: str) -> str:
    """Return the class name of a reward model, given that of the causal language model."""
    prefix = causal.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    # Without "Text", the class is multimodal.
    text = "Text" if prefix in ("Gemma3", "Qwen3_5") else ""
    return f"{prefix}{text}{_REWARD_CLASS}"


def read_head(given: HFConfigReader) -> dict[str, Any]:
    """Return the flags of a causal decoder's head. Raises CheckpointError if the head is a
    classifier with several labels."""
    classes = given.names("architectures") or []
    if not any(name.endswith(_REWARD_CLASS) for name in classes):
        return {}
    labels = len(given.table("id2label")) or given.content.get("num_labels") or 2
    if labels != 1:
        given.refuse(
            "architectures", classes, f"it has {labels} labels; a reward model has one (num_labels)"
        )
    return {"head": "reward"}
