"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver, Setting, Settings
from megatron.features.experts.axis import ExpertAxisFlags, check_divided
from megatron.features.experts.flags import ExpertsConfig, UpcyclingConfig


def _upcycle_command() -> Any:
    from megatron.features.experts.upcycling import upcycle_command

    return upcycle_command


class ExpertsFeature(Feature):
    model_parts = (ExpertsConfig,)
    sections = {"upcycling": UpcyclingConfig}
    flag_parts = {"parallel": ExpertAxisFlags}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        """Set --finetune if a run upcycles, so that it loads only weights."""
        if "moe_use_upcycling" in settings and settings["moe_use_upcycling"].value:
            return settings | {"finetune": Setting(True, "flag --moe-use-upcycling")}
        return settings

    def architectures(self) -> Sequence[Any]:
        from megatron.features.experts.huggingface import deepseek, llama, llama4, others

        return (
            *llama.ARCHITECTURES,
            others.GPT_OSS,
            llama4.LLAMA4,
            *deepseek.ARCHITECTURES,
            *others.ARCHITECTURES,
        )

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        part = config.model.part(ExpertsConfig)
        part.check_run(config.model.family, config.parallel, resolver)
        part.check_batch(config.training.micro_batch_size * config.model.seq_length, resolver)
        config.section(UpcyclingConfig).check(config)

    def check_engine(self, content: Mapping[str, Any], config: Any) -> Sequence[str]:
        if config.layout(content).expert_axis > 1:
            from megatron.engine.deepspeed_json import running_stage

            completed = dict(content)
            check_divided(completed, running_stage(completed, config))
        return ()

    def conversions(self) -> Mapping[str, Callable[[], Any]]:
        return {"upcycle": _upcycle_command}

    def before_load(self, context: Any) -> None:
        if context.config.section(UpcyclingConfig).moe_use_upcycling:
            from megatron.features.experts.upcycling import upcycle

            context.source = replace(context.source, found=upcycle(context))

    def mlp(self, config: Any, layer: int, tp: Any) -> Any:
        experts = config.part(ExpertsConfig).experts_of(layer)
        if not experts:
            return None
        from megatron.features.experts.layer import ExpertsMLP

        return ExpertsMLP(config, experts, tp)

    def model(self, spec: Any, config: Any) -> Any:
        part = config.model.part(ExpertsConfig)
        if part.idle:
            return spec
        from megatron.features.experts.layer import with_balancing

        return with_balancing(spec, config.model)

    def shape(self, shape: Any, config: Any) -> Any:
        if config.model.part(ExpertsConfig).idle:
            return shape
        from megatron.features.experts.costs import with_experts

        return with_experts(shape, config.model)

    def kernel_states(
        self,
        blocks: Sequence[Any],
        names: Mapping[Any, str],
        config: Any,
        mesh: Any,
        partitioned: bool,
    ) -> Any:
        if config.model.part(ExpertsConfig).idle:
            return None
        from megatron.features.experts.balance import balances_of

        return balances_of(blocks, mesh)

    def extent(self, config: Any, plan: Any, sizes: Any) -> Sequence[str]:
        if config.model.part(ExpertsConfig).idle or not config.fast_paths.in_8_bits:
            return ()
        return (
            f"--fp8-format {config.fast_paths.fp8_format}: the products of experts and routers are "
            "in the dtype of the model; attention and dense MLPs are in 8 bits",
        )

    def ready(self, context: Any) -> None:
        part = context.config.model.part(ExpertsConfig)
        if part.idle or context.config.training.skip_train:
            return
        from megatron.features.experts.report import ExpertsReport
        from megatron.training.context import Order

        context.add(Order.REPORT, ExpertsReport(part, context))


FEATURE = ExpertsFeature()
