"""Summary of a fine-tuning run, and its model card: the README.md of a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.apps.finetune.provenance import TuningRecord
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.config import RunConfig
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.flags import PreferenceConfig
from megatron.training.writers import Rows

_CHAT = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({folder})
model = AutoModelForCausalLM.from_pretrained({folder}, device_map="auto")
prompt = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Name a planet."}}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
).to(model.device)
answer = model.generate(**prompt, max_new_tokens=256)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True))
```"""
_TEXT = """```python
from transformers import pipeline

generate = pipeline("text-generation", {folder}, device_map="auto")
print(generate("The planet next to Earth is", max_new_tokens=64)[0]["generated_text"])
```"""
PREFERENCES = {
    "dpo": "DPO",
    "ipo": "IPO",
    "kto": "KTO",
    "orpo": "ORPO",
    "simpo": "SimPO",
    "reward": "reward model",
}
TITLES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "rloo": "RLOO",
    "reinforce++": "REINFORCE++",
    "ppo": "PPO",
    "online-dpo": "Online DPO",
    "distill": "On-policy distillation",
}


@dataclass(frozen=True)
class TuningSummary:
    """Summary of a fine-tuning run.

    Attributes:
        config: configuration of the last start.
        record: provenance of the run.
        steps: number of optimizer steps.
        rows: rows of the metrics file up to the last of these steps.
    """

    config: RunConfig
    record: TuningRecord
    steps: int
    rows: Rows

    @property
    def method(self) -> str:
        """Name of the training method, such as "DPO with LoRA"."""
        preference = self.config.section(PreferenceConfig).preference
        adapters = self.config.section(AdapterConfig)
        trained = "QLoRA" if adapters.qlora else "LoRA" if adapters.lora else ""
        algorithm = self.config.section(ReinforcementConfig).rl
        name = TITLES.get(algorithm or "") or PREFERENCES.get(preference or "")
        if name is not None:
            return name + (f" with {trained}" if trained else "")
        return f"Supervised fine-tuning{f' with {trained}' if trained else ' of all weights'}"

    def facts(self) -> dict[str, str]:
        """Return facts about the run, as titles and values in display order."""
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
        files = {"Data": self.record.data, "Held-out data": self.record.eval_data}
        dtype = "bfloat16" if config.precision.bf16 else "float32"
        dtype = "float16" if config.precision.fp16 else dtype
        return {
            "Base model": self.record.model,
            "Method": self.method,
            **self._adapters(),
            **{what: ", ".join(names) for what, names in files.items() if names},
            "Samples": f"{samples:,} for training, {self.record.held_out:,} held out",
            **self._format(),
            "Longest sample": f"{config.model.seq_length:,} tokens",
            "Length": length,
            "Learning rate": f"{optimizer.lr:g}, {optimizer.lr_decay_style}",
            "Optimizer": f"{_OPTIMIZERS[optimizer.optimizer]}, weight decay "
            f"{optimizer.weight_decay:g}, gradients clipped at {optimizer.clip_grad:g}",
            "Precision": dtype,
            "Layout": f"tensor {parallel.tensor_model_parallel_size} x pipeline "
            f"{parallel.pipeline_model_parallel_size} x data {parallel.data_parallel_size}, "
            f"ZeRO stage {config.engine.zero_stage}",
            "Seed": str(training.seed),
            "Programs": self.record.programs,
            **{f"Changed after step {after}": "; ".join(lines) for after, lines in changes.items()},
        }

    def _adapters(self) -> dict[str, str]:
        adapters = self.config.section(AdapterConfig)
        if not (adapters.lora or adapters.qlora):
            return {}
        what = (
            f"rank {adapters.lora_rank}, scale {adapters.scale:g}, dropout "
            f"{adapters.lora_dropout:g}, on {' '.join(adapters.lora_targets)}"
        )
        what += ", rsLoRA" * adapters.use_rslora + ", DoRA" * adapters.use_dora
        return {"Adapters": what}

    def _format(self) -> dict[str, str]:
        instruction = self.config.section(InstructionConfig)
        preference = self.config.section(PreferenceConfig)
        texts = self.config.section(ReinforcementConfig)
        if texts.rl is not None:
            return {"Texts": _texts(texts)}
        if preference.preference is not None:
            return {"Loss": f"{preference.preference}, beta {preference.beta:g}"}
        counted = {
            "all": "of all answers",
            "last": "of the last answer of each example",
            "everything": "of everything",
        }[instruction.loss_on]
        packed = ", packed" if instruction.packing else ""
        return {"Loss": f"tokens {counted}{packed}"}

    def results(self) -> list[tuple[str, str, str]]:
        """Return the metrics on held-out data as (name, value before the first step, final value),
        with the dataset's name if there are several. An unknown value is ""."""
        comparisons = []
        kinds = dict.fromkeys(row["kind"] for row in self.rows)
        for kind in (k for k in kinds if k.partition(" ")[0] == "validation"):
            rows = [row for row in self.rows if row["kind"] == kind]
            first = rows[0] if rows[0]["iteration"] == 0 else {}
            set_name = kind.partition(" ")[2]
            for name, value in numbers(rows[-1]).items():
                shown = f"{name} ({set_name})" if set_name else name
                before = first.get(name)
                comparisons.append(
                    (shown, "" if before is None else f"{before:.4f}", f"{value:.4f}")
                )
        return comparisons


def _texts(options: ReinforcementConfig) -> str:
    """Describe the completions that the policy generates: number, length and reward."""
    model = () if options.reward_model is None else ("a reward model",)
    environment = () if options.environment is None else (options.environment,)
    rewards = ", ".join((*options.reward_funcs, *model, *environment)) or "a teacher"
    return (
        f"{options.num_generations} after each prompt, of at most {options.max_completion_length} "
        f"tokens, at temperature {options.temperature:g}; judged by {rewards}"
    )


_OPTIMIZERS = {"adam": "AdamW", "sgd": "SGD", "muon": "Muon", "lion": "Lion"}
_CLOCKS = frozenset({"iteration", "consumed_samples", "consumed_tokens"})
_SAID_BY_LOSS = ("perplexity", " PPL")


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite values in a row of metrics, without perplexities, which follow from the
    losses. A training step's loss is renamed to its name in evaluations and occurs only once."""
    named = {value for name, value in row.items() if name.endswith(" loss")}
    if "loss" in row and (not named or row["loss"] in named):
        # Steps with one loss call it "loss". Others have "loss" and each loss under its own name.
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


def model_card(summary: TuningSummary, name: str, has_template: bool) -> str:
    """Return the model card for the folder ``name``. Its usage example can use a chat template."""
    names = {*PREFERENCES.values(), *TITLES.values()} - {"reward model"}
    method = summary.method.partition(" with ")[0]
    tags = ["megatron-deepspeed", method.lower() if method in names else "sft"]
    if summary.config.section(AdapterConfig).lora:
        tags.append("lora")
    front = {
        "base_model": summary.record.model,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    head = "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items())
    use = (_CHAT if has_template else _TEXT).format(folder=json.dumps(name))
    parts = [
        f"---\n{head}---",
        f"# {name}",
        f"{summary.method} of `{summary.record.model}`, by Megatron-DeepSpeed's "
        "`finetune.py`. The license and the intended use of the base model apply.",
        "## Use",
        use,
        "## Training",
        _table(("", ""), [*summary.facts().items()]),
    ]
    results = summary.results()
    if results:
        parts.append(f"## On {summary.record.held_out:,} held-out samples")
        parts.append(_table(("", "before", "after"), results))
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
