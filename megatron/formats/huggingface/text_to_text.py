"""What an encoder and a decoder do in `transformers`: they turn a text into a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.checkpoint.files import read_json, write_json
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig, ParallelConfig
from megatron.config.kinds.masked_data import MaskedDataConfig
from megatron.data.kinds.masked_data.masked_batch import T5Batch
from megatron.families import spec_of
from megatron.formats.huggingface.tasks import Inputs, Task
from megatron.model.layer_list import LayerState

_SHORTEST, _BEYOND, _LONGEST = 128, 32, 1024
"""Sequences that are compared have at least so many tokens, and so many more than the distance from
which on positions count alike; but at most so many more."""


class TextToText(Task):
    """An encoder that reads a text and a decoder that writes one, as T5's."""

    settings: ClassVar[Mapping[str, Any]] = {"use_cache": True}
    generates = True

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """A full encoder input and one with padding; the decoder's inputs are a third shorter."""
        beyond = model.positions.relative_attention_max_distance + _BEYOND
        length = min(max(_SHORTEST, beyond), _SHORTEST + _LONGEST)
        random = torch.Generator().manual_seed(seed)
        tokens_BE, tokens_BD = (
            torch.randint(model.vocabulary.size, (2, size), generator=random)
            for size in (length, length - length // 8)
        )
        mask_BE = (torch.arange(length) < torch.tensor([[length], [length - length // 3]])).long()
        mask_BD = torch.ones_like(tokens_BD)
        batch = T5Batch(tokens_BE, tokens_BD, tokens_BD, mask_BD.float(), mask_BE, mask_BD)
        begin = spec_of(model, ParallelConfig()).begin(batch)
        theirs = {
            "input_ids": tokens_BE, "attention_mask": mask_BE, "decoder_input_ids": tokens_BD
        }  # fmt: skip
        return Inputs(begin.changed(targets=None), theirs)

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        return {"logits": state.hidden[..., : model.vocabulary.size]}

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        start = "pad"
        if source.run is not None:
            start = source.run.kind(MaskedDataConfig).decoder_start_token
        return {
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "decoder_start_token_id": getattr(tokenizer, f"{start}_token_id"),
        }

    def end_only(self, end_of_text: int | None) -> dict[str, Any]:
        return {"eos_token_id": end_of_text}

    def prepare_tokenizer(self, folder: Path, tokenizer: Any) -> None:
        """Makes the files put the end of text after a text, and nothing before it, as samples of
        this project have it; files that do so already, such as those of T5, stay."""
        path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if tokenizer("a")["input_ids"] == tokenizer(
            "a", add_special_tokens=False
        )["input_ids"] + [tokenizer.eos_token_id] or not path.is_file():
            return
        end = {"id": tokenizer.eos_token, "type_id": 0}
        text = {"id": "A", "type_id": 0}
        pair = {"id": "B", "type_id": 0}
        content = read_json(path)
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"Sequence": text}, {"SpecialToken": end}],
            "pair": [{"Sequence": text}, {"SpecialToken": end}, {"Sequence": pair}, {"SpecialToken": end}],
            "special_tokens": {
                tokenizer.eos_token: {
                    "id": tokenizer.eos_token,
                    "ids": [tokenizer.eos_token_id],
                    "tokens": [tokenizer.eos_token],
                }
            },
        }
        write_json(path, content)
        # Classes such as BertTokenizer have a template of their own.
        settings_now = read_json(settings) if settings.is_file() else {}
        write_json(settings, settings_now | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        })


TEXT_TO_TEXT = TextToText()
