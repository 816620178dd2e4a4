"""Flags for retrievers: the bi-encoder, and the samples of the inverse cloze task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import KindConfig, ModelPart
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, ConfigResolver, option

FAMILY = "biencoder"


@dataclass(frozen=True, kw_only=True)
class BiencoderConfig(ModelPart):
    """Bi-encoder retriever: its embeddings and how they are scored."""

    biencoder_shared_query_context_model: bool = option(False, role="weights", megatron=True)
    """Use one encoder for queries and contexts, instead of one for each."""
    biencoder_projection_dim: int = option(
        0, bounds=NOT_NEGATIVE, role="weights", aliases=("--ict-head-size",), megatron=True
    )
    """Embedding size. A linear layer computes the embedding from the first token's hidden state. 0
    uses the hidden state itself."""
    retriever_score_scaling: bool = option(False, role="results", megatron=True)
    """Divide scores, the inner products of embeddings, by the square root of --hidden-size."""
    retriever_report_topk_accuracies: tuple[int, ...] = option(())
    """Values of K for top-K accuracy: the percentage of queries whose context is among the K
    best."""

    families: ClassVar[frozenset[str]] = frozenset({FAMILY})

    @property
    def idle(self) -> bool:
        return not (self.biencoder_shared_query_context_model or self.biencoder_projection_dim)

    def further_blocks(self, model: Any) -> int:
        one = self.biencoder_shared_query_context_model or model.family != FAMILY
        return 0 if one else model.num_layers

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> BiencoderConfig:
        resolver.check(
            min(self.retriever_report_topk_accuracies, default=1) > 0,
            f"{resolver.show('retriever_report_topk_accuracies')}: expected numbers of 1 or more",
        )
        return self


@dataclass(frozen=True)
class IctConfig(KindConfig):
    """Inverse cloze task: the samples for a retriever, and its initial weights."""

    titles_data_path: str | None = option(None)
    """Prefix of the indexed dataset with one title for each document of --data-path: the output
    PREFIX_title_sentence of tools/preprocess_data.py --json-keys text title --split-sentences."""
    query_in_block_prob: float = option(0.1, bounds=SHARE)
    """Fraction of samples whose query sentence is not removed from its block."""
    use_one_sent_docs: bool = option(False)
    """Include documents and blocks that have only one sentence."""
    bert_load: str | None = option(None)
    """BERT checkpoint, in any format, that initialises the encoders if --load has none yet."""
    retriever_seq_length: int = option(256, bounds=POSITIVE)
    """Maximum number of tokens in a question or passage in fine-tuning and evaluation. Longer ones
    are truncated. The inverse cloze task uses --seq-length."""

    idle: ClassVar[str] = "only a retriever (pretrain_ict.py) has queries and titles"
