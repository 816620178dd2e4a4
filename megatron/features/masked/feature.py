"""BERT and T5: masked samples, layers, families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.features.masked.flags import MaskedDataConfig


class MaskedFeature(Feature):
    sections = {"masked_data": MaskedDataConfig}
    families = ("bert", "t5")

    def data_kind(self, section: str) -> Any:
        from megatron.features.masked.tfrecord import KIND

        return KIND

    def architectures(self) -> Sequence[Any]:
        from megatron.features.masked.hf_bert import BERT, MEGATRON_BERT
        from megatron.features.masked.hf_encoders import (
            CAMEMBERT,
            DISTILBERT,
            ELECTRA,
            ROBERTA,
            XLM_ROBERTA,
        )
        from megatron.features.masked.hf_t5 import MT5, T5

        encoders = (ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, DISTILBERT)
        return (MEGATRON_BERT, BERT, T5, *encoders, MT5)

    def family(self, name: str) -> Any:
        from megatron.features.masked import bert, t5

        return {"bert": bert.FAMILY, "t5": t5.FAMILY}[name]


FEATURE = MaskedFeature()
