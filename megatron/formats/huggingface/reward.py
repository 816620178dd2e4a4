"""Reward models in `transformers`: a causal decoder for sequence classification with one label,
whose head reads the last token of a text."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import Entry, weight
from megatron.formats.huggingface.tasks import CausalLM, Inputs
from megatron.model.layer_list import LayerState

_CLASS = "ForSequenceClassification"
_OTHERS = {"Gemma3": "Gemma3Text"}
"""How the class of a text model begins, where that of the causal model begins otherwise."""
_LABEL = "LABEL_0"

SCORE: tuple[Entry, ...] = weight("score", "score")
"""The tensor of the head, in place of the one for tokens."""


def has_rewards(model: ModelConfig) -> bool:
    """Whether it is a reward model."""
    return model.head == "reward"


def reward_class(causal: str) -> str:
    """The class of reward models, from that of causal language models."""
    prefix = causal.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return f"{_OTHERS.get(prefix, prefix)}{_CLASS}"


def reward_keys() -> dict[str, Any]:
    """Keys of config.json that such a model has in addition."""
    return {"id2label": {"0": _LABEL}, "label2id": {_LABEL: 0}}


def read_head(given: HFConfigReader) -> dict[str, Any]:
    """The flags of a causal decoder's head. Raises CheckpointError if it has several labels."""
    classes = given.names("architectures") or []
    if not any(name.endswith(_CLASS) for name in classes):
        return {}
    labels = len(given.table("id2label")) or given.content.get("num_labels") or 2
    if labels != 1:
        given.refuse(
            "architectures", classes, f"it has {labels} labels; a reward model has one (num_labels)"
        )
    return {"head": "reward"}


class RewardTask(CausalLM):
    """A decoder that says how good a text is."""

    settings: ClassVar[dict[str, Any]] = {}
    unit = "texts"
    generates = False

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """One text at a time: of several they ask for a token of padding."""
        found = super().inputs(model, seed)
        ours, theirs = found.ours, dict(found.theirs)
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
        found = super().special_tokens(tokenizer, source)
        pad = tokenizer.pad_token_id
        if pad is not None and pad != tokenizer.eos_token_id:
            found["pad_token_id"] = pad
        return found


REWARD = RewardTask()
