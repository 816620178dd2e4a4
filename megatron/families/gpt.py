"""GPT: a causal decoder that continues text and is trained to predict the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, Setting, Settings
from megatron.config.features import DOCUMENTS, PACKED, kind_classes
from megatron.config.flags import build
from megatron.data.gpt_batch import GPTBatch, GPTCollator
from megatron.data.gpt_dataset import GPTRecipe, MockGPTDataset
from megatron.data.pipeline import DataKind, DataPipeline, SampleTokens, kind_named
from megatron.data.samples import PackedSample, SampleRecipe, SampleView, causal_view
from megatron.data.texts import ScoredText, check_lengths, fitted, too_long
from megatron.families.family import Family, GenerationSpec
from megatron.model.attention_flex import block_masks
from megatron.model.attention_masks import AttentionMasks
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, vocabulary_layers, word_embeddings
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerCache, LayerSpec, LayerState
from megatron.model.norm import FinalNorm
from megatron.model.spec import ModelSpec, only_hidden_travels
from megatron.parallel.loss_head import Targets
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.tokenizer import Tokenizer

LENGTHS = 8
"""Maximum number of distinct sequence lengths that samples are padded to on GPUs."""


def gpt_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """Return the layers of a GPT: token embedding, positions, blocks, final norm and head. Features
    add all heads other than the language-model head. ``tp`` is None for a single process."""
    tp = tp or TensorParallel()
    selective = "core_attn" in parallel.recomputed_modules
    if model.head == "lm":
        words, *head = vocabulary_layers(model, parallel, tp, model.embedding.lm_head_bias)
    else:
        words, head = word_embeddings(model, tp), []
    return [
        words,
        LayerSpec("embedding", partial(InputEmbedding, model, tp)),
        *(
            LayerSpec(f"layers.{n}", partial(Block, model, n, tp, selective), block=True)
            for n in range(model.num_layers)
        ),
        LayerSpec("final_norm", partial(FinalNorm, model, tp)),
        *head,
    ]


def begin(model: ModelConfig, batch: GPTBatch) -> LayerState:
    """Return the first layer's input state for a micro batch."""
    blocks = block_masks(model, batch.tokens_BS, batch.document_ids_BS)
    return LayerState(
        hidden=batch.tokens_BS,
        position_ids=batch.position_ids_BS,
        masks=AttentionMasks(batch.document_ids_BS, blocks=blocks),
        targets=targets_of(batch),
    )


def targets_of(batch: GPTBatch) -> Targets:
    """Return the tokens to predict, at all positions or only at those that the batch selects."""
    targets = Targets(batch.labels_BS, batch.loss_mask_BS)
    if batch.positions_BP is None:
        return targets
    targets = Targets(*targets.at(batch.positions_BP)[:2], batch.positions_BP)
    return targets if batch.choices_BK is None else targets.ending_in(batch.choices_BK)


def _continue(tokens_1S: Tensor, positions_1S: Tensor, cache: LayerCache) -> LayerState:
    return LayerState(tokens_1S, position_ids=positions_1S, cache=cache)


class GPTData(DataPipeline):
    """Data of a GPT: streams of text, instructions with answers, and fill-in-the-middle text."""

    takes = frozenset({DOCUMENTS, PACKED, "pairs", "prompts"})

    def recipe(self) -> SampleRecipe[Any]:
        epochs = self.config.data.train_data_exact_num_epochs
        recipe: SampleRecipe[Any] = GPTRecipe(
            self.seq_length, self.seed, self.tokenizer.vocab_size, epochs
        )
        for kind in self.acting:
            recipe = kind.recipe(self, recipe)
        return recipe

    def collator(self) -> Callable[[Sequence[Any]], GPTBatch]:
        data, special = self.config.data, self._special
        collate = GPTCollator(
            self._eod(),
            data.reset_position_ids,
            data.reset_attention_mask,
            data.eod_mask_loss,
            pad_token=None if special is None else special.pad,
            identifies=self.identifies,
        )
        return self._packed.collator(self, collate) if self.reads_examples else collate

    def samples_of(self, tokens: int) -> int | None:
        return max(0, tokens - 1) // self.seq_length  # consecutive samples share a token

    @property
    def _packed(self) -> DataKind:
        """Kind of data whose samples pack several examples."""
        return kind_named(next(n for n, cls in kind_classes().items() if cls.samples == PACKED))

    @property
    def length_multiple(self) -> int:
        multiple = super().length_multiple
        if self.config.fast_paths.one_length:
            multiple = self.seq_length  # a single shape, for kernels and CUDA graphs
        elif torch.cuda.is_available():
            # Use few lengths, because blocks are compiled for each. Kernels prefer multiples of 8.
            eighth = -(-self.seq_length // (LENGTHS * 8)) * 8
            multiple = int(np.lcm(eighth, multiple))
        return min(multiple, self.seq_length)

    def answering(self) -> Callable[[Sequence[ScoredText], int], GPTBatch]:
        return partial(GPTBatch.scoring, longest=self.config.model.positions.longest)

    def ending(self) -> Callable[[Sequence[np.ndarray], int], GPTBatch]:
        return GPTBatch.ended

    def mock(self, num_samples: int, part: int) -> MockGPTDataset:
        vocab_size = self.tokenizer.vocab_size
        return MockGPTDataset(
            num_samples, self.seq_length, vocab_size, self.seed, part, self._eod()
        )

    @property
    def reads_examples(self) -> bool:
        """True if some or all samples are instructions with answers."""
        if self.config.data.mock_data:
            return False
        blends = self.parts.blends()
        packed = {kind.files for kind in self.config.kinds if kind.samples == PACKED}
        return any(source.kind in packed for blend in blends for source in blend.sources)

    def view(self, sample: Any, length: int) -> SampleView:
        """Return a sample as shown to users. Text that attention separates is on separate lines."""
        batch = self.collator()([sample])
        tokens, labels, mask, documents = (
            None if each is None else each[0, :length].numpy()
            for each in (
                batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.document_ids_BS
            )
        )  # fmt: skip
        assert tokens is not None and labels is not None and mask is not None
        answers = isinstance(sample, PackedSample)
        return causal_view(self.tokenizer, tokens, labels, mask, documents, answers)

    @property
    def _special(self) -> SampleTokens | None:
        """Special tokens of the first kind of data that defines its own, or None."""
        return next(filter(None, (kind.special_tokens(self) for kind in self.acting)), None)

    def _eod(self) -> int | None:
        data, special = self.config.data, self._special
        needing = [
            "--" + name.replace("_", "-")
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            if getattr(data, name)
        ]
        if not needing:
            return None
        if special is not None:
            return special.eod
        try:
            return self.tokenizer.eod
        except ValueError as error:
            raise ValueError(f"{', '.join(needing)}: {error}") from None


class GPT(Family):
    name = "gpt"
    generates = True
    context_reader = "decoder"
    unused_flags = frozenset({"bert_binary_head", "num_tokentypes", "lm_head_activation"})

    def complete_settings(self, settings: Settings) -> Settings:
        for cls in kind_classes().values():
            head = build(cls, settings).head
            if head is not None:
                settings = settings | {"head": Setting(head[0], f"derived: {head[1]}")}
        return settings

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        layers = partial(gpt_layers, model, parallel)
        crossing = partial(only_hidden_travels, model.hidden_size)
        return ModelSpec(layers, partial(begin, model), crossing)

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        shape = TransformerShape.of(model)
        if model.head == "lm":
            return shape
        return replace(shape, predictions=0, other=2.0 * model.hidden_size)

    def generation(self, config: RunConfig, tokenizer: Tokenizer | None) -> GenerationSpec:
        return GenerationSpec(_continue, config.model.positions.max_position_embeddings)

    def answered(
        self, model: ModelConfig, tokenizer: Tokenizer, prompt: str, answer: str
    ) -> ScoredText:
        """Return the prompt, a space and the answer. The beginning of a prompt that is too long is
        dropped."""
        context, whole = tokenizer.tokenize(prompt), tokenizer.tokenize(f"{prompt} {answer}")
        continuation = whole[len(context) :]
        room = model.seq_length + 1 - len(continuation)
        if room < 1:
            raise too_long(answer, len(continuation), model.seq_length, "--seq-length")
        return ScoredText(np.array(context[-room:]), np.array(continuation))

    def scored_lengths(
        self, config: RunConfig, texts: Sequence[ScoredText]
    ) -> npt.NDArray[np.int64]:
        lengths = np.array([len(text.context) + len(text.continuation) - 1 for text in texts])
        check_lengths(lengths, config.model.positions.longest)
        return lengths

    def scored_batch(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        texts: Sequence[ScoredText],
        pad_to: int | None = None,
    ) -> GPTBatch:
        longest = config.model.positions.longest
        needed = int(self.scored_lengths(config, texts).max())
        divisor = config.parallel.length_divisor
        return GPTBatch.scoring(texts, fitted(pad_to, needed, longest, divisor), longest)

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DataPipeline:
        if config.model.head == "reward" and not any(kind.head for kind in config.kinds):
            raise ConfigError(
                "the model has the head of a reward model, which predicts no tokens: give "
                "--preference reward, or load another checkpoint"
            )
        return GPTData(config, tokenizer)


FAMILY = GPT()
