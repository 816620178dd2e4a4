#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Tries every language model of the installed transformers: which are read, which are refused.

    python tools/list_models.py
    python tools/list_models.py --changes
    python tools/list_models.py --write

The first command prints the table. After an upgrade of transformers, the second says what differs
from the release before, and the third writes the page of the documentation and the snapshot again.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import parse_configs
from megatron.config.flags import option
from megatron.formats.huggingface import REASONS, architecture_named, architectures
from megatron.formats.huggingface.within import renaming, text_content
from megatron.util.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "huggingface-models.md"
SNAPSHOT = ROOT / "docs" / "generate" / "transformers_models.json"

KINDS = {
    "CAUSAL_LM": "causal",
    "MASKED_LM": "masked",
    "SEQ_TO_SEQ_CAUSAL_LM": "text to text",
    "IMAGE_TEXT_TO_TEXT": "sees images",
}
"""The mappings of transformers, and their word on the page."""

SENSIBLE: Mapping[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
              "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "electra": {"embedding_size": 256},
    "glm4_moe": {"hidden_size": 6144},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None}},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "granitemoehybrid": {  # the dense models
        "layer_types": ["full_attention"] * 32, "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}  # fmt: skip
"""Values of configurations whose defaults describe no model."""

INTRODUCTION = """# Models of transformers

Every language model of transformers {release} by `model_type`, and what this project makes of its
default configuration. This page is the output of `python tools/list_models.py --markdown`; after an
upgrade of transformers, `--changes` reports what is different, and `--write` writes the page.

{count} types: {read} are read and written, {refused} are refused. "No table" means that no
architecture of that name is known here; what follows is read from its configuration, which is not
everything that such a table would need. A `model_type` that is refused can still be read where the
configuration has other values; the message of `--load` names the key.
"""


@dataclass(frozen=True)
class ListModelsConfig:
    """Models of transformers: what is printed or written."""

    markdown: bool = option(False)
    """Print the page of the documentation, in Markdown."""
    changes: bool = option(False)
    """Print what the installed transformers has that the stored snapshot lacks, and the reverse:
    model types, keys of config.json and tensors of the architectures that are read."""
    write: bool = option(False)
    """Write the page of the documentation and the snapshot of this release."""
    only: tuple[str, ...] = option(())
    """Values of model_type to try; all without it."""


class Row(NamedTuple):
    """One model type: the kinds of its classes, one class, the architecture that reads it ("" if it
    is refused), and the reason or a remark."""

    model_type: str
    kinds: tuple[str, ...]
    model_class: str
    title: str
    note: str


def classes() -> dict[str, dict[str, str]]:
    """The class of each kind by model type, as the installed transformers has them."""
    from transformers.models.auto import modeling_auto

    types: dict[str, dict[str, str]] = {}
    for mapping, kind in KINDS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for model_type, named in names.items():
            types.setdefault(model_type, {})[kind] = named if isinstance(named, str) else named[0]
    return dict(sorted(types.items()))


def config_of(model_type: str) -> Any:
    """The default configuration of a model type. Raises whatever transformers raises if its
    defaults contradict each other."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**SENSIBLE.get(model_type, {}))


def row_of(model_type: str, named: Mapping[str, str]) -> Row:
    """Try one model type."""
    kinds, first = tuple(named), next(iter(named.values()))
    title, note = verdict(model_type, "masked" if "masked" in kinds else kinds[0])
    return Row(model_type, kinds, first, title, note)


def verdict(model_type: str, kind: str = "causal") -> tuple[str, str]:
    """The title of the architecture that reads a default configuration, or "" and the reason of the
    refusal; ``kind`` is one of :data:`KINDS`."""
    try:
        content = config_of(model_type).to_dict()
    except Exception as error:  # transformers' validation has classes of its own
        return "", f"its default configuration is refused by transformers: {_line(error)}"
    path, within = Path("config.json"), renaming(content) is not None
    try:
        content = text_content(content, path)
        form = architecture_named(content, path)
    except ValueError:
        return "", REASONS.get(model_type) or f"no table; {missing(content, kind)}"
    try:
        form.model(content, path)
    except ValueError as error:
        return "", _line(error)
    return (f"{form.title}, its text model" if within else form.title), ""


def _line(error: Exception) -> str:
    """The message about one configuration; of keys that no table reads the first three."""
    text = re.sub(r"\s+", " ", str(error)).removeprefix("config.json: ").replace("|", "\\|")
    if text.startswith("the effect of "):
        keys = re.findall(r"\b(\w+) = ", text)
        return f"the effect of {', '.join(keys[:3])} is not known"
    return text if len(text) < 140 else f"{text[:137]}..."


RECURRENT = re.compile("mamba|linear|conv|recurrent|rwkv|ssm|delta|kda|lightning|gla")
"""Names of kinds of blocks that are not attention to all keys."""
SIGHT = re.compile("(vision|vit|image|video|audio|speech|sound)_?(config|encoder_config|tower)")


def _number(*names: str, above: int = 0) -> Callable[[Mapping[str, Any]], str | None]:
    def shown(content: Mapping[str, Any]) -> str | None:
        for name in names:
            value = content.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > above:
                return f"{name} = {value}"
        return None

    return shown


_states = _number("state_size", "ssm_state_size", "mamba_d_state", "attention_hidden_size")


def _recurrent(content: Mapping[str, Any]) -> str | None:
    for name in ("layer_types", "layers_block_type", "block_types", "attn_type_list"):
        kinds = content.get(name)
        if isinstance(kinds, list | tuple):
            others = sorted({each for each in map(str, kinds) if RECURRENT.search(each)})
            if others:
                return f"{name} has {', '.join(others)}"
    return _states(content)


def _sights(content: Mapping[str, Any]) -> str | None:
    names = [name for name in content if SIGHT.fullmatch(name) and content[name]]
    return f"has {', '.join(names)}" if names else None


TRAITS: tuple[tuple[str, Callable[[Mapping[str, Any]], str | None]], ...] = (
    ("encoder and decoder", lambda content: (
        "is_encoder_decoder" if content.get("is_encoder_decoder") else None)),
    ("images or sound", _sights),
    ("recurrent or convolutional layers", _recurrent),
    ("latent attention", _number("kv_lora_rank")),
    ("experts", _number("num_experts", "num_local_experts", "n_routed_experts",
                        "moe_num_experts", above=1)),
)  # fmt: skip
"""Features by which configurations of transformers differ from a dense decoder or encoder, and the
keys that show them."""
NEAREST = {"masked": "bert"}
"""The plainest architecture of a kind; Llama is that of the others."""


def missing(content: Mapping[str, Any], kind: str) -> str:
    """The first of :data:`TRAITS` that a configuration, or its text model's, has; of one without
    any what the plainest table of its kind refuses in it."""
    inner = content.get("text_config")
    for title, shown in TRAITS:
        evidence = shown(content) or (isinstance(inner, dict) and shown(inner))
        if evidence:
            return f"{title} ({evidence})"
    nearest = architecture_named({"model_type": NEAREST.get(kind, "llama")}, Path())
    try:
        nearest.model(dict(content), Path("config.json"))
    except (ValueError, TypeError) as error:
        return f"as {nearest.title}: {_line(error)}"
    return f"its keys alone are those of {nearest.title}"


def rows(only: Sequence[str] = ()) -> list[Row]:
    """All rows, or those of some model types. Raises ValueError for one that transformers lacks."""
    known = classes()
    if unknown := sorted({*only} - {*known}):
        import transformers

        raise ValueError(
            f"--only {' '.join(unknown)}: transformers {transformers.__version__} has no such "
            "language model"
        )
    return [row_of(name, named) for name, named in known.items() if not only or name in only]


def cells(row: Row) -> str:
    """A line of the page's table."""
    verdict = row.title or f"refused: {row.note}"
    return f"| `{row.model_type}` | {', '.join(row.kinds)} | `{row.model_class}` | {verdict} |"


def markdown(table: Sequence[Row]) -> str:
    """The page of the documentation."""
    import transformers

    read = sum(bool(row.title) for row in table)
    head = INTRODUCTION.format(
        release=transformers.__version__, count=len(table), read=read, refused=len(table) - read
    )
    lines = ["| model_type | kinds | class | here |", "| --- | --- | --- | --- |"]
    return "\n".join([head, *lines, *map(cells, table), ""])


def described(model_type: str, model_class: str) -> dict[str, list[str]]:
    """Keys of the configuration of an architecture, without those that all have, and names of the
    tensors of its model, ``{n}`` for numbers, which are not allocated."""
    import torch
    import transformers

    config = config_of(model_type)
    if config.to_dict().get("head_dim", 0) is None and config.num_attention_heads:  # Ministral
        config.head_dim = config.hidden_size // config.num_attention_heads
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    names = {re.sub(r"\.\d+(?=\.)", ".{n}", name) for name in model.state_dict()}
    usual = transformers.PretrainedConfig().to_dict()
    return {"keys": sorted({*config.to_dict()} - {*usual}), "tensors": sorted(names)}


def snapshot(table: Sequence[Row]) -> dict[str, Any]:
    """The release: its model types, and what it says of each architecture that is read."""
    import transformers

    known = {form.model_type for form in architectures()}
    return {
        "transformers": transformers.__version__,
        "model_types": [row.model_type for row in table],
        "architectures": {
            row.model_type: described(row.model_type, row.model_class)
            for row in table
            if row.model_type in known
        },
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Lines about the differences of two snapshots."""
    yield f"transformers {before['transformers']} to {after['transformers']}"
    for what, names in _differences(before["model_types"], after["model_types"]):
        yield f"model types {what}: {', '.join(names)}"
    for model_type, now in after["architectures"].items():
        then = before["architectures"].get(model_type)
        if then is None:
            yield f"{model_type}: read since the snapshot"
            continue
        for kind, title in (("keys", "keys of config.json"), ("tensors", "tensors")):
            for what, names in _differences(then[kind], now[kind]):
                yield f"{model_type}: {title} {what}: {', '.join(names)}"
    for model_type in sorted({*before["architectures"]} - {*after["architectures"]}):
        yield f"{model_type}: no longer read, or no longer in transformers"


def _differences(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for what, names in (("added", {*after} - {*before}), ("gone", {*before} - {*after})):
        if names:
            yield what, sorted(names)


def to_text(content: Mapping[str, Any]) -> str:
    """A snapshot as JSON, an architecture per line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(each)}" for name, each in content["architectures"].items()
    ]
    head = {name: content[name] for name in ("transformers", "model_types")}
    return json.dumps(head)[:-1] + ',\n"architectures": {\n' + ",\n".join(lines) + "\n}}\n"


def main(argv: Sequence[str] | None = None) -> None:
    import transformers

    (config,) = parse_configs((ListModelsConfig,), argv, description=__doc__)
    transformers.logging.set_verbosity_error()
    table = rows(config.only)
    if config.changes:
        print("\n".join(changes(json.loads(SNAPSHOT.read_text()), snapshot(table))))
    elif config.write:
        if config.only:
            raise SystemExit(f"--only {' '.join(config.only)}: --write needs all models")
        write_whole(PAGE, markdown(table).encode())
        write_whole(SNAPSHOT, to_text(snapshot(table)).encode())
    elif config.markdown:
        print(markdown(table), end="")
    else:
        for row in table:
            print(f"{row.model_type:24} {row.title or 'refused: ' + row.note}")


if __name__ == "__main__":
    main()
