"""Feature with the BERT and T5 families and their masked data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.features.masked.flags import (
    EncoderDecoderConfig,
    FirstNormConfig,
    MaskedDataConfig,
    SplitFlags,
)


class MaskedFeature(Feature):
    needs = ("cross_attention",)
    sections = {"masked_data": MaskedDataConfig}
    flag_parts = {"parallel": SplitFlags}
    model_parts = (FirstNormConfig, EncoderDecoderConfig)
    families = ("bert", "t5")

    def data_kind(self, section: str) -> Any:
        from megatron.features.masked.tfrecord import KIND

        return KIND

    def architectures(self) -> Sequence[Any]:
        from megatron.features.masked.hf_bart import BART, MBART, PLBART
        from megatron.features.masked.hf_bert import BERT, MEGATRON_BERT
        from megatron.features.masked.hf_encoders import (
            CAMEMBERT,
            DISTILBERT,
            ELECTRA,
            MODERNBERT,
            ROBERTA,
            XLM_ROBERTA,
        )
        from megatron.features.masked.hf_t5 import MT5, T5, UMT5

        encoders = (ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, DISTILBERT, MODERNBERT)
        return (MEGATRON_BERT, BERT, T5, *encoders, MT5, UMT5, BART, MBART, PLBART)

    def network(self, spec: Any, model: Any, parallel: Any) -> Any:
        if model.part(FirstNormConfig).first_norm:
            return spec
        from megatron.features.masked.layers import without_first_norm

        return without_first_norm(spec, model)

    def family(self, name: str) -> Any:
        from megatron.features.masked import bert, t5

        return {"bert": bert.FAMILY, "t5": t5.FAMILY}[name]


FEATURE = MaskedFeature()
