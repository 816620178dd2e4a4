"""Tasks of the models of `transformers`: their descriptions in folders, and the inputs and outputs
that are compared with ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor

from megatron.checkpoint.files import read_json, write_json
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig, ParallelConfig
from megatron.families import spec_of
from megatron.features.masked.flags import MaskedDataConfig
from megatron.model.layer_list import LayerState
from megatron.util.files import write_whole

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
        """Number of :attr:`unit` that the compared logits are of."""
        return logits.shape[:-1].numel()

    @abstractmethod
    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        """Keys of config.json about tokens; ``tokenizer`` is that of `transformers`."""

    @abstractmethod
    def end_only(self, source: Source) -> dict[str, Any]:
        """The same keys where there is no tokenizer, and at most one token is known."""

    def fit_tokenizer(self, folder: Path, tokenizer: Any) -> bool:
        """Changes a tokenizer's files so that its tokens of a text are those that such a model was
        trained with; returns True if it did. ``tokenizer`` is that of `transformers`."""
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
        longrope = model.positions.rope_scaling.rope_type == "longrope"
        length, last = compared_length(model), model.positions.max_position_embeddings
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


class MaskedLM(Task):
    """An encoder that predicts masked tokens, and with its second head whether two segments belong
    together."""

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Two samples of two segments; the second is padded."""
        from megatron.features.masked.masked_batch import BertBatch

        theirs, positions_BS = _texts(model, seed, 2)
        tokens_BS, padding_mask_BS = theirs["input_ids"], theirs["attention_mask"]
        batch = BertBatch(
            tokens_BS,
            theirs["token_type_ids"],
            labels_BS=tokens_BS,
            is_random_B=torch.zeros(2, dtype=torch.int64),
            loss_mask_BS=padding_mask_BS.float(),
            padding_mask_BS=padding_mask_BS,
            positions_BP=torch.arange(tokens_BS.shape[1]).expand(2, -1),
            position_ids_BS=positions_BS,
        )
        begin = spec_of(model).begin(batch).changed(targets=None)
        return Inputs(begin, theirs, counted=padding_mask_BS.bool())

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        logits_BSV = state.hidden[..., : model.vocabulary.size]
        if not model.bert_binary_head:
            return {"logits": logits_BSV}
        assert state.pooled is not None
        return {"prediction_logits": logits_BSV, "seq_relationship_logits": state.pooled}

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        return {"pad_token_id": tokenizer.pad_token_id}

    def end_only(self, source: Source) -> dict[str, Any]:
        return {"pad_token_id": None}


MASKED_LM = MaskedLM()


def _texts(model: ModelConfig, seed: int, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random texts of two segments, every second one padded and at the last positions: arguments of
    `forward`, and our positions."""
    length, last = compared_length(model), model.positions.max_position_embeddings
    random = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(model.vocabulary.size, (rows, length), generator=random)
    types_BS = torch.zeros_like(tokens_BS)
    if model.token_types:
        types_BS = torch.randint(model.token_types, (rows, length), generator=random)
    padding_mask_BS = torch.ones_like(tokens_BS)
    padding_mask_BS[1::2, length - length // 4 :] = 0
    positions_BS = torch.arange(length).repeat(rows, 1)
    positions_BS[1::2] += last - length
    theirs = {
        "input_ids": tokens_BS,
        "token_type_ids": types_BS,
        "attention_mask": padding_mask_BS,
        "position_ids": positions_BS + model.positions.position_embedding_offset,
    }
    return theirs, positions_BS


class LabelledTextTask(MaskedLM):
    """An encoder that says which label a text has, which of several texts is the best, or where in
    a text a span is."""

    unit = "texts"

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Two texts of two segments, the second padded; of questions two with as many choices."""
        from megatron.data.texts import LabelledBatch

        choices = 3 if model.head == "multiple_choice" else 1
        theirs, positions_BS = _texts(model, seed, 2 * choices)
        tokens_BS, types_BS, padding_mask_BS, _ = theirs.values()
        labels_B = torch.zeros(2, dtype=torch.int64)
        batch = LabelledBatch(tokens_BS, types_BS, padding_mask_BS, labels_B, choices)
        begin = spec_of(model).begin(batch)
        if choices > 1:
            theirs = {name: values.view(2, choices, -1) for name, values in theirs.items()}
        return Inputs(begin.changed(targets=None, position_ids=positions_BS), theirs)

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        if model.head == "span":
            start_BS, end_BS = state.hidden.unbind(-1)
            return {"start_logits": start_BS, "end_logits": end_BS}
        assert state.pooled is not None
        return {"logits": state.pooled}

    def count(self, logits: Tensor) -> int:
        return len(logits)


LABELLED_TEXT = LabelledTextTask()


_SHORTEST, _BEYOND, _LONGEST = 128, 32, 1024
"""Tokens of a compared sequence: at least, more than the distance from which positions are treated
alike, and at most more."""


class TextToText(Task):
    """An encoder that reads a text and a decoder that writes one, as T5's."""

    generates = True

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """A full encoder input and one whose last third is padding; the decoder's inputs are an
        eighth shorter."""
        from megatron.features.masked.masked_batch import T5Batch

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
            start = source.run.section(MaskedDataConfig).decoder_start_token
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
    """The key for generation with a cache: that of `transformers` has as many layers as the
    encoder, and fails where the decoder has more."""
    return {"use_cache": (model.decoder_num_layers or 0) <= model.num_layers}


TEXT_TO_TEXT = TextToText()
