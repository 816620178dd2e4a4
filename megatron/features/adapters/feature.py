"""Feature for LoRA adapters: low-rank additions to the linear layers of a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigError, ConfigResolver, Setting, Settings, build
from megatron.features.adapters.flags import AdapterConfig, LoadedAdapterFlags


def _adapted_checkpoint() -> Any:
    from megatron.features.adapters.checkpoint import AdaptedCheckpoint

    return AdaptedCheckpoint


def _peft_folder() -> Any:
    from megatron.features.adapters.peft import PeftFolder

    return PeftFolder


def _to_peft() -> Any:
    from megatron.features.adapters.peft import to_peft

    return to_peft


class AdaptersFeature(Feature):
    needs = ("inputs",)
    after = ("instruction", "preference", "distillation", "planning")
    sections = {"adapters": AdapterConfig}
    flag_parts = {"checkpoint": LoadedAdapterFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        in_8_bits = config.fast_paths.in_8_bits
        config.section(AdapterConfig).check(in_8_bits, resolver)

    def checkpoints(self, config: Any) -> dict[str, str | None]:
        return {"--load-adapter": config.checkpoint.load_adapter}

    def formats(self) -> Sequence[Any]:
        from megatron.checkpoint.source import Format

        return (
            Format("adapters", _adapted_checkpoint),
            Format("peft", _peft_folder, after="huggingface"),
        )

    def conversions(self) -> Mapping[str, Callable[[], Any]]:
        return {"to-peft": _to_peft}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        from megatron.features.inputs.compared import located_model

        return located_model("adapter that it began from", config.checkpoint.load_adapter)

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        """Add the Hugging Face architecture of the base model to the settings. --lora-targets uses
        its module names, and several architectures may fit the same model flags (Phi-3 is a Llama
        with fused matrices). Raises CheckpointError if the base is missing or damaged."""
        if "lora" not in settings or not settings["lora"].value:
            return settings
        from megatron.config.output import CheckpointConfig
        from megatron.training.resume import find_origin

        origin = find_origin(build(CheckpointConfig, settings))
        if origin is None:
            return settings
        source = origin.found.open(verify=False)
        setting = Setting(source.model.hf_architecture, f"checkpoint {source.folder.name}")
        return settings | {"hf_architecture": setting}

    def model(self, spec: Any, config: Any) -> Any:
        if not config.section(AdapterConfig).lora:
            return spec
        from megatron.features.adapters.model import with_adapters

        return with_adapters(spec, config)

    def shape(self, shape: Any, config: Any) -> Any:
        if not config.section(AdapterConfig).lora:
            return shape
        from megatron.features.adapters.report import with_additions

        return with_additions(shape, config)

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        if not config.section(AdapterConfig).qlora:
            return None
        return "weights in 4 bits (--qlora) are made 16-bit numbers outside of graphs"

    def built(self, engine: Any) -> None:
        if engine.config.section(AdapterConfig).qlora:
            from megatron.features.adapters.quantised_engine import find_quantised

            line = find_quantised(engine)
            if engine.mesh.world.rank == 0:
                print(line, flush=True)

    def base(self, spec: Any, config: Any) -> tuple[Any, int] | None:
        flags = config.section(AdapterConfig)
        if not flags.qlora:
            return None
        from megatron.features.adapters.model import with_adapters

        return with_adapters(spec, config), 1 + flags.qlora_double_quant

    def load_base(self, engine: Any, source: Any) -> None:
        if engine.config.section(AdapterConfig).qlora:
            from megatron.engine.loading import load_weights, together
            from megatron.features.adapters.flags import is_adapter
            from megatron.features.adapters.quantised_engine import find_quantised

            find_quantised(engine)
            added = [name for name in engine.names.values() if is_adapter(name)]
            together(engine, lambda: load_weights(engine, source, added))

    def load(self, engine: Any, source: Any, fresh: Sequence[str], continues: bool) -> Any:
        if not engine.config.section(AdapterConfig).lora:
            return None
        from megatron.features.adapters.loading import load_adapted

        return load_adapted(engine, source, fresh, continues)

    def check_source(self, config: Any, source: Any) -> None:
        """Check the base of adapters. Raises ConfigError if adapters lack a base model, or the
        flags that load and save them contradict each other."""
        options, lora = config.checkpoint, config.section(AdapterConfig).lora
        if options.load_adapter and not lora:
            raise ConfigError(
                f"--load-adapter {options.load_adapter} needs --lora, which trains the adapters; "
                "tools/convert_checkpoint.py to-hf merges them into their base"
            )
        if lora and source is None and (options.save or options.load_adapter):
            raise ConfigError(
                "--lora trains additions to a model that exists: name it by --pretrained-checkpoint"
            )
        if lora and options.checkpoint_format != "safetensors":
            raise ConfigError(
                f"--checkpoint-format {options.checkpoint_format} contradicts --lora: DeepSpeed's "
                "folders contain whole models; leave it out"
            )
        if lora and options.save_universal:
            raise ConfigError(
                "--save-universal contradicts --lora: universal checkpoints contain whole models; "
                "leave it out"
            )

    def extent(self, config: Any, plan: Any, sizes: Callable[[], Sequence[Any]]) -> Sequence[str]:
        if not config.section(AdapterConfig).lora:
            return ()
        from megatron.features.adapters.report import trained_line

        return (trained_line(config),)


FEATURE = AdaptersFeature()
