"""The text model within a model that sees images or hears sound: its part of config.json, and its
names of tensors. The rest is left in the files.

A text has the same positions in all three parts of an M-RoPE, whose rotation is then that of RoPE.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError

MULTIMODAL = (
    "gemma3", "gemma4", "idefics3", "internvl", "llama4", "llava", "llava_next", "llava_onevision",
    "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    "shieldgemma2", "smolvlm", "vipllava",
)  # fmt: skip
"""Values of model_type whose text model has its own model_type."""

_SAME = {
    "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_text": "qwen3",
}  # fmt: skip
"""Text models that compute, for text alone, the same as another architecture."""
_FIXED = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Their keys without an equivalent in the text model."""
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Types whose files of transformers 4 have the keys of the text model next to those of images, and
whose tensors have the names of a text model alone."""
_OF_IMAGES = (
    "vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id",
)  # fmt: skip
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
)
"""Beginnings of names of the text model in files, of transformers 4 and 5, and in its own."""
Renaming = Callable[[str], str | None]
"""The name of a tensor in files of a text model alone; None for a tensor of another part."""


def text_content(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The keys of the text model in the content of the config.json at ``path``; the content itself
    where it describes nothing else. Raises CheckpointError if the part is missing."""
    outer = content.get("model_type")
    if outer not in MULTIMODAL:
        return content
    inner = content.get("text_config")
    if inner is None and outer in _FLAT:
        inner = {key: value for key, value in content.items() if key not in _OF_IMAGES}
        inner["model_type"] = f"{outer}_text"
    elif inner is None and outer.startswith("qwen3_5") and "num_hidden_layers" in content:
        return content  # for its text model alone, under the name of the whole model
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"{path}: model_type is {outer!r}, which sees images too, and text_config, which "
            "describes its text model, is missing"
        )
    kind = inner.get("model_type") or f"{outer}_text"
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: text_config: model_type is {kind!r:.100}")
    if kind in _SAME:
        inner = _defaults(kind, path, inner) | inner | _FIXED.get(kind, {})
    return inner | {"model_type": _SAME.get(kind, kind), **_rotations(inner)}


def _rotations(inner: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE of text alone: without the shares of a head that rows and columns of images rotate."""
    rotations = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = inner.get(key)
        if isinstance(table, dict) and "mrope_section" in table:
            plain = {
                name: "default" if value == "mrope" else value
                for name, value in table.items()
                if name not in ("mrope_section", "mrope_interleaved")
            }
            rotations[key] = plain
    return rotations


def _defaults(kind: str, path: Path, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for keys missing from a text model's keys ``inner``, where the defaults of
    the architecture that reads it may differ."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{path}: the installed transformers has no {kind}, whose defaults text_config may "
            "leave out; install a newer version"
        )
    known = CONFIG_MAPPING[kind]
    # Keys of two names.
    pairs = [{*pair} for pair in known.attribute_map.items()]
    spelled = {name for pair in pairs if pair & inner.keys() for name in pair}
    return {
        each.name: each.default
        for each in inspect.signature(known).parameters.values()
        if isinstance(each.default, bool | int | float | str)
        if not each.name.startswith("_") and each.name not in spelled
    }


def renaming(content: Mapping[str, Any]) -> Renaming | None:
    """The names of tensors in files with that config.json; None where all are a text model's."""
    outer = content.get("model_type")
    if outer not in MULTIMODAL or (outer.startswith("qwen3_5") and "text_config" not in content):
        return None

    def renamed(name: str) -> str | None:
        for theirs, alone in _PREFIXES:
            if name.startswith(theirs):
                return alone + name.removeprefix(theirs)
        of_text = outer in _FLAT and name.startswith("model.") and "visual." not in name
        # A head by another name must not be left out: the model would be taken for a tied one.
        return name if of_text or "lm_head" in name else None

    return renamed


def head_tied(content: dict[str, Any], outer: Mapping[str, Any], has_head: bool) -> dict[str, Any]:
    """Return the content of a text model with its tie: a head missing from the files is tied, a
    present one only if the whole model's config says so."""
    inner = content.get("tie_word_embeddings", False)
    return content | {
        "tie_word_embeddings": not has_head or outer.get("tie_word_embeddings", inner)
    }


class RenamedTensors:
    """The tensors of an open safetensors file by other names; those without one are left out."""

    def __init__(self, handle: Any, renamed: Renaming) -> None:
        self._handle = handle
        self._names = {new: name for name in handle.keys() if (new := renamed(name))}  # noqa: SIM118

    def keys(self) -> list[str]:
        """The names."""
        return list(self._names)

    def get_slice(self, name: str) -> Any:
        """A slice, which is not read yet."""
        return self._handle.get_slice(self._names[name])

    def get_tensor(self, name: str) -> Any:
        """A tensor."""
        return self._handle.get_tensor(self._names[name])
