"""Registration and memory report of 4-bit weights of a run with ``--qlora``."""

from __future__ import annotations

import math

from megatron.engine.train_engine import ModelEngine
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.nf4 import bytes_of, quantised_weights
from megatron.model.layer_list import canonical_name, canonical_prefixes


def find_quantised(engine: ModelEngine) -> str:
    """Register an engine's 4-bit weights so that a checkpoint can be loaded into them. Without a
    checkpoint they are initialised. Return a line about their memory for the log."""
    config, prefixes = engine.config, canonical_prefixes(engine.layers)
    engine.quantised = [
        (canonical_name(registered, prefixes), weight)
        for registered, weight in quantised_weights(engine.model)
    ]
    if not (config.checkpoint.load or config.checkpoint.pretrained_checkpoint):
        for name, weight in engine.quantised:
            weight.initialise(name, config.training.seed, engine.device)
    count = sum(math.prod(weight.shape) for _, weight in engine.quantised)
    size = bytes_of(count, config.section(AdapterConfig).qlora_double_quant)
    line = f"--qlora: {count:,} weights of this process in 4 bits, {size / 2**20:,.1f} MiB"
    if engine.stage == 3 and engine.mesh.dense.size > 1:
        line += "; ZeRO 3 partitions the other parameters, these every data-parallel rank has whole"
    return line
