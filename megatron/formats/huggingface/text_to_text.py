"""What an encoder and a decoder do in `transformers`: they turn a text into a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor

from megatron.checkpoint.files import read_json, write_json
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig, ParallelConfig
from megatron.families import family_of, spec_of
from megatron.formats.huggingface.tasks import Inputs, Task
from megatron.model.layer_list import LayerState
from megatron.util.files import write_whole

_SHORTEST, _BEYOND, _LONGEST = 128, 32, 1024
"""Sequences that are compared have at least so many tokens, and so many more than the distance from
which on positions count alike; but at most so many more."""


class TextToText(Task):
    """An encoder that reads a text and a decoder that writes one, as T5's."""

    generates = True

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """A full encoder input and one whose last third is padding; the decoder's inputs are an
        eighth shorter."""
        beyond = model.positions.relative_attention_max_distance + _BEYOND
        length = min(max(_SHORTEST, beyond), _SHORTEST + _LONGEST)
        random = torch.Generator().manual_seed(seed)
        tokens_BE, tokens_BD = (
            torch.randint(model.vocabulary.size, (2, size), generator=random)
            for size in (length, length - length // 8)
        )
        mask_BE = (torch.arange(length) < torch.tensor([[length], [length - length // 3]])).long()
        mask_BD = torch.ones_like(tokens_BD)
        batch_of = family_of(model.family).batch
        batch = batch_of(tokens_BE, tokens_BD, tokens_BD, mask_BD.float(), mask_BE, mask_BD)
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
            start = source.run.part("masked_data").decoder_start_token
        return {
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "decoder_start_token_id": getattr(tokenizer, f"{start}_token_id"),
            **_cache(source.model),
        }

    def end_only(self, source: Source) -> dict[str, Any]:
        # Those of T5, which `transformers` assumes where nothing is said.
        end = 1 if source.end_of_text is None else source.end_of_text
        tokens = {"pad_token_id": 0, "eos_token_id": end, "decoder_start_token_id": 0}
        return tokens | _cache(source.model)

    def fit_tokenizer(self, folder: Path, tokenizer: Any) -> bool:
        """Puts the end of text after a text, and nothing before it, as samples have it; T5's own
        files do so already."""
        path, end = folder / "tokenizer.json", tokenizer.eos_token
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        if tokenizer("a")["input_ids"] == [*plain, tokenizer.eos_token_id] or not path.is_file():
            return False
        backend = Tokenizer.from_file(str(path))
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A {end} $B {end}",
            special_tokens=[(end, tokenizer.eos_token_id)],
        )
        write_whole(path, backend.to_str(pretty=True).encode())
        settings = read_json(folder / "tokenizer_config.json", lenient=True)
        # BertTokenizer has a template of its own, and a T5 takes no token types.
        settings |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
        write_json(folder / "tokenizer_config.json", settings)
        return True


def _cache(model: ModelConfig) -> dict[str, bool]:
    """Whether texts are generated with a cache: that of `transformers` has as many layers as the
    encoder, and fails where the decoder has more."""
    return {"use_cache": (model.decoder_num_layers or 0) <= model.num_layers}


TEXT_TO_TEXT = TextToText()
