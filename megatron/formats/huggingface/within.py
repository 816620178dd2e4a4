"""The text model inside a model for images or sound: its section of config.json, and the names of
its tensors. Everything else in the files is ignored.

For text, all three components of M-RoPE have the same position, so M-RoPE equals RoPE.
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
"""Values of ``model_type`` of multimodal models whose text model has its own ``model_type``."""

_SAME = {
    "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_text": "qwen3",
}  # fmt: skip
"""Model types of text models that compute exactly what another architecture computes from text,
mapped to the ``model_type`` of that architecture."""
_FIXED = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Keys to add for a text model whose config.json does not have them."""
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Types for which transformers 4 stores the text model's keys at the top level, next to those for
images, and names the text model's tensors as in a separate text model."""
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
"""Prefixes of tensor names, as pairs: in files of transformers 4 or 5, and in a separate text
model."""
Renaming = Callable[[str], str | None]
"""Function that converts a tensor's name in the files to its name in a separate text model. It
returns None for tensors outside the text model."""


def text_content(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the text model's keys in ``content``, the config.json at ``path``, or ``content``
    itself if it only describes a text model. Raises CheckpointError if the section is missing."""
    outer = content.get("model_type")
    if outer not in MULTIMODAL:
        return content
    inner = content.get("text_config")
    if inner is None and outer in _FLAT:
        inner = {key: value for key, value in content.items() if key not in _OF_IMAGES}
        inner["model_type"] = f"{outer}_text"
    elif inner is None and outer.startswith("qwen3_5") and "num_hidden_layers" in content:
        return content  # the folder has only the text model, under the multimodal type
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
    """Return the RoPE keys for text, without M-RoPE's sections for image rows and columns."""
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
    """Return the defaults of the text model's configuration class for keys that ``inner`` lacks.
    They may differ from those of the architecture as which it is read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{path}: the installed transformers has no {kind}, whose defaults text_config may "
            "leave out; install a newer version"
        )
    known = CONFIG_MAPPING[kind]
    # Some keys have two names; if one is present, neither needs a default.
    pairs = [{*pair} for pair in known.attribute_map.items()]
    spelled = {name for pair in pairs if pair & inner.keys() for name in pair}
    return {
        each.name: each.default
        for each in inspect.signature(known).parameters.values()
        if isinstance(each.default, bool | int | float | str)
        if not each.name.startswith("_") and each.name not in spelled
    }


def renaming(content: Mapping[str, Any]) -> Renaming | None:
    """Return the function that renames the tensors in files with this config.json. Return None if
    all of them belong to the text model."""
    outer = content.get("model_type")
    if outer not in MULTIMODAL or (outer.startswith("qwen3_5") and "text_config" not in content):
        return None

    def renamed(name: str) -> str | None:
        for theirs, alone in _PREFIXES:
            if name.startswith(theirs):
                return alone + name.removeprefix(theirs)
        of_text = outer in _FLAT and name.startswith("model.") and "visual." not in name
        # Keep a head with an unknown name: without it, the model would be read as tied.
        return name if of_text or "lm_head" in name else None

    return renamed


def head_tied(content: dict[str, Any], outer: Mapping[str, Any], has_head: bool) -> dict[str, Any]:
    """Return a text model's keys with ``tie_word_embeddings`` set. A head that the files lack is
    tied. A head in the files is tied only if the multimodal config.json says so."""
    inner = content.get("tie_word_embeddings", False)
    return content | {
        "tie_word_embeddings": not has_head or outer.get("tie_word_embeddings", inner)
    }


class RenamedTensors:
    """Open safetensors file whose tensors have new names. Tensors without a new name are hidden."""

    def __init__(self, handle: Any, renamed: Renaming) -> None:
        self._handle = handle
        self._names = {new: name for name in handle.keys() if (new := renamed(name))}  # noqa: SIM118

    def keys(self) -> list[str]:
        """Return the new names."""
        return list(self._names)

    def get_slice(self, name: str) -> Any:
        """Return a lazy slice of a tensor, without reading its data."""
        return self._handle.get_slice(self._names[name])

    def get_tensor(self, name: str) -> Any:
        """Read a tensor."""
        return self._handle.get_tensor(self._names[name])
