"""Feature that adds bi-encoders and the inverse cloze task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.retrieval.flags import FAMILY, BiencoderConfig, IctConfig


class RetrievalFeature(Feature):
    needs = ("inputs", "masked")
    sections = {"ict": IctConfig}
    model_parts = (BiencoderConfig,)
    families = (FAMILY,)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        if config.model.family != FAMILY:
            return
        resolver.check(
            config.parallel.context_parallel_size == 1,
            f"{resolver.show('context_parallel_size')}: the texts of a retriever are short, and "
            "their sequences are not divided over ranks; leave it out, and use "
            "--tensor-model-parallel-size with --sequence-parallel, which divides activations",
        )
        positions = config.model.positions
        longest, length = positions.longest, config.section(IctConfig).retriever_seq_length
        resolver.check(
            longest is None or length <= longest or not resolver.given("retriever_seq_length"),
            f"{resolver.show('retriever_seq_length')}: the model has {longest} positions "
            "(--max-position-embeddings); give as many or fewer",
        )

    def checkpoints(self, config: Any) -> Mapping[str, str | None]:
        return {"--bert-load": config.section(IctConfig).bert_load}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        titles = config.section(IctConfig).titles_data_path
        if titles is None:
            return {}
        from megatron.features.retrieval.samples import titles_input

        return {"titles": titles_input(titles)}

    def before_load(self, context: Any) -> None:
        bert = context.config.section(IctConfig).bert_load
        if context.config.model.family == FAMILY and bert is not None and context.source is None:
            from megatron.features.retrieval.start import towers_of

            context.source = towers_of(bert, context.config.model)

    def family(self, name: str) -> Any:
        from megatron.features.retrieval.family import FAMILY

        return FAMILY


FEATURE = RetrievalFeature()
