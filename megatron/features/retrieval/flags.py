"""Flags of retrievers: the network of two encoders, and the samples of the inverse cloze task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import KindConfig, ModelPart
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, ConfigResolver, option

FAMILY = "biencoder"


@dataclass(frozen=True, kw_only=True)
class BiencoderConfig(ModelPart):
    """Retriever: the vectors of two encoders, and how they are compared."""

    biencoder_shared_query_context_model: bool = option(False, role="weights", megatron=True)
    """One encoder embeds queries and contexts; otherwise each has an encoder of its own."""
    biencoder_projection_dim: int = option(
        0, bounds=NOT_NEGATIVE, role="weights", aliases=("--ict-head-size",), megatron=True
    )
    """Elements of a vector, by a linear layer after the first token's hidden state; 0 for that
    hidden state itself."""
    retriever_score_scaling: bool = option(False, role="results", megatron=True)
    """Divide scores, the inner products of vectors, by the root of --hidden-size."""
    retriever_report_topk_accuracies: tuple[int, ...] = option(())
    """Numbers K: report how many percent of the queries have their context among the K with the
    highest scores."""

    families: ClassVar[frozenset[str]] = frozenset({FAMILY})

    @property
    def idle(self) -> bool:
        return not (self.biencoder_shared_query_context_model or self.biencoder_projection_dim)

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
    """Inverse cloze task: the samples of a retriever, and what it starts from."""

    titles_data_path: str | None = option(None)
    """Prefix of the indexed titles, one for each document of --data-path: PREFIX_title_sentence of
    tools/preprocess_data.py --json-keys text title --split-sentences."""
    query_in_block_prob: float = option(0.1, bounds=SHARE)
    """Fraction of the samples whose query stays in its block."""
    use_one_sent_docs: bool = option(False)
    """Use documents and blocks of a single sentence, too."""
    bert_load: str | None = option(None)
    """Checkpoint of a BERT, in any format, that both encoders start from where --load has no
    checkpoint yet."""
    retriever_seq_length: int = option(256, bounds=POSITIVE)
    """Tokens of a question or a passage in fine-tuning and evaluation; longer ones are cut. The
    inverse cloze task has --seq-length."""

    idle: ClassVar[str] = "only a retriever (pretrain_ict.py) has queries and titles"
