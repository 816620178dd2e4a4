"""Checks of a completed DeepSpeed JSON for keys that would not have the effect they promise."""

from __future__ import annotations

from megatron.config import ConfigError, RunConfig
from megatron.engine.deepspeed_json import Json, get, running_stage

_FP16_MAIN_WEIGHTS = "fp16.fp16_master_weights_and_grads"


def refuse(content: Json, config: RunConfig) -> None:
    """Raise ConfigError for values in a completed JSON that, with the run's flags, DeepSpeed would
    handle incorrectly or would reject by an assertion when the engine is built."""
    path = config.engine.deepspeed_config
    if content.get("bf16", {}).get("check_grad_overflow") is False:
        raise ConfigError(
            f"{path}: bf16.check_grad_overflow false would let gradients that are not finite into "
            "the weights; remove the key (--no-check-for-nan-in-loss-and-grad skips such steps)"
        )
    if get(content, "fp16.auto_cast") is True:
        raise ConfigError(
            f"{path}: fp16.auto_cast true would cast masks and weights of losses to float16, which "
            "are float32; remove the key"
        )
    if config.engine.zero_stage == 0 and get(content, _FP16_MAIN_WEIGHTS):
        raise ConfigError(
            f"{path}: {_FP16_MAIN_WEIGHTS} true, --zero-stage 0: main weights and the gradients "
            "that update them are float32 there; remove the key"
        )
    if get(content, "flops_profiler.enabled") and config.parallel.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"{path}: flops_profiler.enabled true, --pipeline-model-parallel-size "
            f"{config.parallel.pipeline_model_parallel_size}: the profiler measures the engine's "
            "forward pass, which a pipeline does not have as a whole; remove the key, or profile "
            "without a pipeline"
        )
    stage = running_stage(content, config)
    scatters = get(content, "zero_optimization.reduce_scatter") is not False
    if content.get("prescale_gradients") and stage >= 2 and scatters:
        raise ConfigError(
            f"{path}: prescale_gradients true, --zero-stage {stage}: "
            "DeepSpeed scales before it reduces at stages 0 and 1 only; set false or "
            '"auto", which is true at stage 0'
        )
