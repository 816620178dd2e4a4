"""Tags under which a run's values appear in the trackers, and texts in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.training.registry import METRICS, WrittenText
from megatron.training.writers import STEP, Values

_ORDER = (
    *("loss", "grad_norm", "num_zeros", "params_norm", "learning_rate", "weight_decay"),
    *("global_batch_size", "loss_scale", "seconds_per_iteration", "samples_per_second"),
    *("tokens_per_second_per_device", "tflops_per_device", "mfu", "hfu"),
    *("memory_allocated_bytes", "memory_reserved_bytes"),
    *("experts_max_over_mean", "experts_entropy", "experts_dropped_share", "experts_idle"),
    *("energy_joules", "co2_grams", "cost", "cost_left", "seconds_left"),
    *("slowest_rank", "own_seconds_slowest", "own_seconds_median", "own_seconds_fastest"),
)

TAGS: dict[str, dict[str, str]] = {
    "train": {
        name: tag or name.replace("_", "-")
        for name in _ORDER
        if (tag := METRICS[name].tag) is not None
    },
    "validation": {"loss": "lm loss validation", "perplexity": "lm loss validation ppl"},
    "test": {"loss": "lm loss test", "perplexity": "lm loss test ppl"},
}
"""Tags for TensorBoard and Weights & Biases, by kind of row and name of the value. They are
Megatron's tags where these exist."""

_GROUPS = {"task": "tasks", "experts": "experts"}
"""Tag group for kinds of rows whose values all belong to one group."""


def tagged(kind: str, values: Values) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) for each value in a row. Values without a tag, and None, are skipped."""
    if kind == STEP:
        return
    # the name of a task, or of one of several validation sets
    kind, _, dataset = kind.partition(" ")
    if kind in _GROUPS:
        # TensorBoard and Weights & Biases group tags by what precedes the slash.
        for name, value in values.items():
            if value is not None:
                words = f"{dataset} {name.replace('_', ' ')}".lstrip()
                yield f"{_GROUPS[kind]}/{words}", value
        return
    tags = TAGS.get(kind, {})
    after = "" if kind == "train" else f" {kind}"
    if any(name.endswith(" loss") for name in values):
        # With several losses, their sum is not the "lm loss".
        tags = tags | {"loss": f"loss{after}"}
    # Loss names contain a space, or a group before a slash. Other training values may be recorded
    # without a tag.
    for name in values:
        if set(name) & set(" /"):
            tags = tags if name.endswith(" PPL") else tags | {name: f"{name}{after}"}
        elif kind == "train" and name not in METRICS:
            tags = tags | {name: name.replace("_", "-")}
    for name, tag in tags.items():
        value = values.get(name)
        if value is not None:
            yield f"{tag} {dataset}".rstrip(), value


def evaluation_tagged(kind: str, values: Values) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) for the losses and perplexities of a validation or test, with
    Megatron-DeepSpeed's tags. With several data sets, each tag ends with its data set's name."""
    what, _, dataset = kind.partition(" ")
    for name, value in values.items():
        loss, ending = name, ""
        if name in ("loss", "perplexity"):
            if name == "loss" and any(other.endswith(" loss") for other in values):
                continue  # the sum of several losses has no tag
            loss = "lm loss"
        if name == "perplexity" or name.endswith(" PPL"):
            loss, ending = loss.removesuffix(" PPL"), " ppl"
        if value is not None:
            yield f"lm-loss-validation/{loss} {what}{ending} {dataset}".rstrip(), value


def as_markdown(text: WrittenText) -> str:
    """Return a text as Markdown code blocks, so that none of it is interpreted as Markdown."""

    def block(content: str) -> str:
        return "".join(f"    {line}\n" for line in content.splitlines() or [""])

    end = "" if text.ended else " (not ended)"
    parts = [f"**prompt**\n\n{block(text.prompt)}", f"**answer**{end}\n\n{block(text.answer)}"]
    if text.reference:
        parts.append(f"**in the data**\n\n{block(text.reference)}")
    return "\n".join(parts)


def flat(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a nested configuration. Return its values as strings, by dotted name."""
    texts: dict[str, str] = {}
    for name, value in configuration.items():
        if isinstance(value, Mapping):
            texts |= {f"{name}.{inner}": text for inner, text in flat(value).items()}
        else:
            texts[name] = str(value)
    return texts
