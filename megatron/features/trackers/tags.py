"""Names of the values of a run in the trackers, and human-readable texts in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.training.registry import METRICS, TAG_ORDER, WrittenText
from megatron.training.writers import STEP, Values

TAGS: dict[str, dict[str, str]] = {
    "train": {name: tag for name in TAG_ORDER if (tag := METRICS[name].tracker_tag)},
    "validation": {"loss": "lm loss validation", "perplexity": "lm loss validation ppl"},
    "test": {"loss": "lm loss test", "perplexity": "lm loss test ppl"},
}
"""Tags of TensorBoard and Weights & Biases by kind and value; Megatron's, where it has one."""

_GROUPS = {"task": "tasks", "experts": "experts"}
"""Group of all values of rows of these kinds."""


def tagged(kind: str, values: Values) -> Iterator[tuple[str, float]]:
    """Return the values of a row by tag, without values that are None or have no tag."""
    if kind == STEP:
        return
    kind, _, dataset = kind.partition(" ")  # one of several validation sets, or a task
    if kind in _GROUPS:
        # The part before the slash is a group in both programs.
        for name, value in values.items():
            if value is not None:
                words = f"{dataset} {name.replace('_', ' ')}".lstrip()
                yield f"{_GROUPS[kind]}/{words}", value
        return
    tags = TAGS.get(kind, {})
    after = "" if kind == "train" else f" {kind}"
    if any(name.endswith(" loss") for name in values):
        # A run with several losses: their sum is not its "lm loss".
        tags = tags | {"loss": f"loss{after}"}
    # Losses and the like have names with spaces, or with a group before a slash; other numbers of
    # training may be recorded without a place in the table.
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
    """The losses of a validation or test, and their perplexities, by Megatron-DeepSpeed's tags,
    followed by the name of the data set where there are several."""
    what, _, dataset = kind.partition(" ")
    for name, value in values.items():
        loss, ending = name, ""
        if name in ("loss", "perplexity"):
            if name == "loss" and any(other.endswith(" loss") for other in values):
                continue  # the sum of several
            loss = "lm loss"
        if name == "perplexity" or name.endswith(" PPL"):
            loss, ending = loss.removesuffix(" PPL"), " ppl"
        if value is not None:
            yield f"lm-loss-validation/{loss} {what}{ending} {dataset}".rstrip(), value


def as_markdown(text: WrittenText) -> str:
    """As blocks of code, in which nothing is markup."""

    def block(content: str) -> str:
        return "".join(f"    {line}\n" for line in content.splitlines() or [""])

    end = "" if text.ended else " (not ended)"
    parts = [f"**prompt**\n\n{block(text.prompt)}", f"**answer**{end}\n\n{block(text.answer)}"]
    if text.reference:
        parts.append(f"**in the data**\n\n{block(text.reference)}")
    return "\n".join(parts)


def flat(configuration: Mapping[str, Any]) -> dict[str, str]:
    """The values of a configuration by their dotted names, as texts."""
    texts: dict[str, str] = {}
    for name, value in configuration.items():
        if isinstance(value, Mapping):
            texts |= {f"{name}.{inner}": text for inner, text in flat(value).items()}
        else:
            texts[name] = str(value)
    return texts
