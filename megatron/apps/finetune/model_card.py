"""The model card of a fine-tuning: the README.md of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping

from megatron.apps.finetune.summary import TuningSummary
from megatron.features.adapters.flags import AdapterConfig

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


def model_card(summary: TuningSummary, name: str, has_template: bool) -> str:
    """The card of the model in the folder ``name``; ``has_template``: it is prompted by a chat
    template."""
    preference = "rl" if summary.method.startswith(("DPO", "IPO", "KTO", "ORPO", "SimPO")) else ""
    tags = ["megatron-deepspeed", "sft" if not preference else summary.method.split()[0].lower()]
    if summary.config.section(AdapterConfig).lora:
        tags.append("lora")
    front = {
        "base_model": summary.base_name,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    head = "".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items())
    use = (_CHAT if has_template else _TEXT).format(folder=json.dumps(name))
    parts = [
        f"---\n{head}---",
        f"# {name}",
        f"{summary.method} of {_code(summary.base_name)}, by Megatron-DeepSpeed's "
        "`finetune.py`. The license and the intended use of the base model apply.",
        "## Use",
        use,
        "## Training",
        _table(("", ""), summary.facts()),
    ]
    results = summary.results()
    if results:
        parts += [
            f"## On {summary.record.held_out:,} held-out samples",
            _table(
                ("", "before", "after"),
                {
                    name: ("" if before is None else f"{before:.4f}", f"{after:.4f}")
                    for name, (before, after) in results.items()
                },
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: Mapping[str, str | tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, values in rows.items():
        cells = (values,) if isinstance(values, str) else values
        lines.append(f"| {' | '.join(map(_cell, (name, *cells)))} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text}`"
