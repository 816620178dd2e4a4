"""The families of models that there is data for."""

from __future__ import annotations

from megatron.data.gpt_data import GPTData
from megatron.data.masked.data import BertData, T5Data
from megatron.data.run_data import RunData

FAMILIES: dict[str, type[RunData]] = {"gpt": GPTData, "bert": BertData, "t5": T5Data}
