"""What a fine-tuning did, in words and numbers, for its model card and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.apps.finetune.provenance import TuningRecord
from megatron.config import RunConfig
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.flags import PreferenceConfig
from megatron.training.writers import Rows

PREFERENCES = {
    "dpo": "DPO",
    "ipo": "IPO",
    "kto": "KTO",
    "orpo": "ORPO",
    "simpo": "SimPO",
    "reward": "reward model",
}


@dataclass(frozen=True)
class TuningSummary:
    """Work that a fine-tuning has done.

    Attributes:
        config: of its last part, if it was resumed.
        steps: of the optimizer.
        rows: of the metrics, of these steps.
    """

    config: RunConfig
    record: TuningRecord
    steps: int
    rows: Rows

    @property
    def base_name(self) -> str:
        """The name of the model that it began with."""
        return self.record.model

    @property
    def method(self) -> str:
        """Such as "DPO with LoRA"."""
        preference = self.config.section(PreferenceConfig).preference
        adapters = self.config.section(AdapterConfig)
        trained = "QLoRA" if adapters.qlora else "LoRA" if adapters.lora else ""
        if preference is not None:
            return PREFERENCES[preference] + (f" with {trained}" if trained else "")
        return f"Supervised fine-tuning{f' with {trained}' if trained else ' of all weights'}"

    def facts(self) -> dict[str, str]:
        """Names and values, in the order in which they are shown."""
        config, training = self.config, self.config.training
        optimizer, parallel = config.optimizer, config.parallel
        samples = self.record.samples
        length = f"{self.steps:,} steps of {training.global_batch_size} samples"
        epochs = self.record.epochs
        if epochs is not None and self.steps * training.global_batch_size >= epochs * samples:
            length += f", {epochs} epoch{'s' * (epochs > 1)}"
        changes: dict[int, list[str]] = {}
        for after, line in self.record.changes:
            changes.setdefault(after, []).append(line)
        found = {
            "Base model": self.base_name,
            "Method": self.method,
            **self._adapters(),
            **self._data(),
            "Samples": f"{samples:,} for training, {self.record.held_out:,} held out",
            **self._format(),
            "Longest sample": f"{config.model.seq_length:,} tokens",
            "Length": length,
            "Learning rate": f"{optimizer.lr:g}, {optimizer.lr_decay_style}",
            "Optimizer": f"{'AdamW' if optimizer.optimizer == 'adam' else 'SGD'}, weight decay "
            f"{optimizer.weight_decay:g}, gradients clipped at {optimizer.clip_grad:g}",
            "Precision": "float16"
            if config.precision.fp16
            else "bfloat16"
            if config.precision.bf16
            else "float32",
            "Layout": f"tensor {parallel.tensor_model_parallel_size} x pipeline "
            f"{parallel.pipeline_model_parallel_size} x data {parallel.data_parallel_size}, "
            f"ZeRO stage {config.engine.zero_stage}",
            "Seed": str(training.seed),
            "Programs": self.record.programs,
            **{f"Changed after step {after}": "; ".join(found) for after, found in changes.items()},
        }
        return found

    def _data(self) -> dict[str, str]:
        named = {"Data": self.record.data, "Held-out data": self.record.eval_data}
        return {what: ", ".join(names) for what, names in named.items() if names}

    def _adapters(self) -> dict[str, str]:
        adapters = self.config.section(AdapterConfig)
        if not (adapters.lora or adapters.qlora):
            return {}
        kinds = [
            word
            for word, on in (("rsLoRA", adapters.use_rslora), ("DoRA", adapters.use_dora))
            if on
        ]
        what = f"rank {adapters.lora_rank}, scale {adapters.scale:g}, dropout "
        what += f"{adapters.lora_dropout:g}, on {' '.join(adapters.lora_targets)}"
        return {"Adapters": ", ".join([what, *kinds])}

    def _format(self) -> dict[str, str]:
        instruction, preference = (
            self.config.section(InstructionConfig),
            self.config.section(PreferenceConfig),
        )
        if preference.preference is not None:
            return {"Loss": f"{preference.preference}, beta {preference.beta:g}"}
        counted = {
            "all": "of all answers",
            "last": "of the last answer of each example",
            "everything": "of everything",
        }[instruction.loss_on]
        packed = ", packed" if instruction.packing else ""
        return {"Loss": f"tokens {counted}{packed}"}

    def results(self) -> dict[str, tuple[float | None, float]]:
        """Numbers on held-out data, before the first step (None if that was not evaluated) and at
        the end, by name; with the set's name where there are several."""
        found: dict[str, tuple[float | None, float]] = {}
        kinds = dict.fromkeys(row["kind"] for row in self.rows)
        for kind in (k for k in kinds if k.partition(" ")[0] == "validation"):
            rows = [row for row in self.rows if row["kind"] == kind]
            first = rows[0] if rows[0]["iteration"] == 0 else {}
            name_of_set = kind.partition(" ")[2]
            for name, value in numbers(rows[-1]).items():
                shown = f"{name} ({name_of_set})" if name_of_set else name
                found[shown] = (first.get(name), value)
        return found


_CLOCKS = frozenset({"iteration", "consumed_samples", "consumed_tokens"})
_SAID_BY_LOSS = ("perplexity", " PPL")


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite values of a row of metrics, without perplexities, which the losses say. The loss
    of a step has the name that evaluations give it, and occurs once."""
    named = {value for name, value in row.items() if name.endswith(" loss")}
    if "loss" in row and (not named or row["loss"] in named):
        # Training steps with one loss say "loss" alone; others say it beside its name.
        row = {("lm loss" if name == "loss" and not named else name): v for name, v in row.items()}
        row.pop("loss", None)
    return {
        name: value
        for name, value in row.items()
        if name not in _CLOCKS
        and not name.endswith(_SAID_BY_LOSS)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }
