"""Conversions that need more than one line of a rule table. Tables call these functions by name
with an @. They convert lists of datasets, files of other programs, and launcher arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.apps.migration.expressions import blend, download, names_of, section
from megatron.apps.migration.rules import translate
from megatron.apps.migration.translation import Translation
from megatron.config import ConfigError
from megatron.util.json_text import parse_json

JSON_KEYS = ("deepspeed", "deepspeed_config", "ds_config")
"""Keys whose value is the path of a DeepSpeed JSON."""


def flattened(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects into dotted keys. Lists of objects, and ``betas``, get their indices
    as keys. Empty objects are kept."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and (
            name == "betas" or any(isinstance(v, Mapping) for v in value)
        ):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def with_json(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration with the keys of its DeepSpeed JSON added, if that file exists here.
    Raises ConfigError if the file is not a JSON object."""
    for path in (source.get(key) for key in JSON_KEYS):
        if not isinstance(path, str):
            continue
        places = (Path(path), folder / path, folder / Path(path).name)
        file = next((place for place in places if place.is_file()), None)
        if file is not None:
            return source | flattened(json_object(file.read_bytes(), str(file)), f"{path}:")
    return source


def json_object(text: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON file's content. Raises ValueError if it is not JSON, or ConfigError if it is not
    an object."""
    content = parse_json(text, name)
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected a JSON object")
    return content


def deepspeed_json(t: Translation) -> None:
    """Translate the DeepSpeed JSON if it exists here. "auto" values follow the flags in both
    programs."""
    key = next(iter(t.given(JSON_KEYS)), None)
    if key is None or not t.source[key]:
        return
    prefix = f"{t.source[key]}:"
    if any(name.startswith(prefix) for name in t.source):
        t.tell(key, "the JSON below")
        translate("deepspeed", t, {}, prefix)
    else:
        t.lose(
            key,
            f"the file {t.source[key]} is not here, and its keys are not translated: put it "
            "next to this one",
        )


def neox_launcher(t: Translation) -> None:
    """Translate the keys that correspond to arguments of the ``deepspeed`` launcher."""
    names = "hostfile include exclude num_nodes num_gpus master_port master_addr launcher"
    for key in t.given(names):
        value, word = t.source[key], f"--{key}"
        if value is not None and value != -1:
            t.launcher += [word, str(value)]
            t.tell(key, f"deepspeed {word} {value}")


def nanotron_rope_scaling(t: Translation) -> None:
    """Translate Hugging Face's ``rope_scaling``, which may name its ``rope_type`` ``type``."""
    name = "model.model_config.rope_scaling"
    scaling = section(t, name)
    if scaling:
        scaling.setdefault("rope_type", scaling.pop("type", "linear"))
        t.put(t.given(f"{name}.*"), "--rope-scaling", json.dumps(scaling))


def nanotron_texts(t: Translation) -> None:
    """Translate the data of the first stage. Later stages must be run separately here."""
    prefix = "data_stages.0.data.dataset." if t.given("data_stages.0.*") else "data.dataset."
    name = f"{prefix}hf_dataset_or_datasets"
    sets = section(t, name) or t.get(name)
    if sets is None or t.get(f"{prefix}dataset_folder") is not None:
        return
    weights = sets if isinstance(sets, dict) else dict.fromkeys(names_of(sets), 1)
    keys, words = t.given(f"{name} {name}.*"), blend([*weights], [*weights.values()])
    t.put(keys, "--data-path", *words, note="a local folder of text files, read while training")
    t.put(keys, "--lazy-loader")


def model_is_named(t: Translation) -> None:
    """Raise ConfigError if the configuration names no model, which fine-tuning requires."""
    key = "base_model" if t.trainer == "axolotl" else "model_name_or_path"
    if not t.get(key):
        raise ConfigError(f"{key} is missing: {t.trainer} needs it")


def llama_factory_datasets(t: Translation) -> None:
    """Translate the training datasets, whose files are listed in ``dataset_info.json``."""
    names, folder = names_of(t.get("dataset")), str(t.get("dataset_dir", "data"))
    if not names:
        raise ConfigError("dataset is missing: LLaMA-Factory needs it")
    paths = [_llama_factory_file(folder, name) for name in names]
    shares = names_of(t.get("interleave_probs"))
    if shares and len(shares) != len(paths):
        raise ConfigError(f"interleave_probs has {len(shares)} shares of {len(paths)} data sets")
    words = [word for pair in zip(shares, paths, strict=True) for word in pair] if shares else paths
    here = (Path(folder) / "dataset_info.json").is_file()
    t.put(
        "dataset dataset_dir interleave_probs",
        "--data" if t.program == "finetune.py" else "--data-path",
        *words,
        note=f"by {folder}/dataset_info.json"
        if here
        else f"names of files are in {folder}/dataset_info.json, which is not here",
    )


def llama_factory_eval_data(t: Translation) -> None:
    """Translate the evaluation datasets, which are not used for training."""
    names, folder = names_of(t.get("eval_dataset")), str(t.get("dataset_dir", "data"))
    if names:
        flag = "--eval-data" if t.program == "finetune.py" else "--valid-data-path"
        t.put("eval_dataset", flag, *(_llama_factory_file(folder, name) for name in names))


def _llama_factory_file(folder: str, name: str) -> str:
    info = Path(folder) / "dataset_info.json"
    if not info.is_file():
        return f"{folder}/{name}.json"
    entry = json.loads(info.read_text(encoding="utf-8")).get(name)
    if entry is None:
        raise ConfigError(f"{info} has no {name}")
    return str(Path(folder) / entry.get("file_name", entry.get("hf_hub_url", name)))


def axolotl_pretraining(t: Translation) -> None:
    """Translate pretraining on plain text, for which the program is ``pretrain_gpt.py``."""
    keys = [key for key in t.given("pretraining_dataset*") if t.source[key]]
    if not keys:
        return
    t.program, name = "pretrain_gpt.py", "pretraining_dataset"
    path = t.get(f"{name}.0.path", t.get(f"{name}.path", t.get(name)))
    used = [key for key in keys if key.endswith("path") or key == name]
    t.put(used, "--data-path", path, note=download(path, "--repo-type dataset "))
    t.put(used, "--lazy-loader")
    for key in keys:
        if key.endswith("text_column"):
            t.put(key, "--text-key", t.source[key])
        elif key.endswith((".name", ".split", ".data_files", ".skip")) and (
            t.source[key] not in ("train", None)
        ):
            t.lose(key, "name the files in --data-path")
    t.harmless(keys, "documents of text are packed in the order of Megatron")


def axolotl_datasets(t: Translation) -> None:
    """Translate axolotl's lists of datasets and their prompt formats."""
    for name, flag in (("datasets", "--data"), ("test_datasets", "--eval-data")):
        numbers = {key.split(".")[1] for key in t.given(f"{name}.*")}
        prefixes = [f"{name}.{index}." for index in sorted(filter(str.isdigit, numbers), key=int)]
        paths = [path for prefix in prefixes for path in _axolotl_paths(t, prefix)]
        for prefix in prefixes:
            keys = t.given(f"{prefix}path {prefix}data_files")
            t.put(keys, flag, *paths, note=download(paths[0], "--repo-type dataset "))
            _axolotl_format(t, f"{prefix}type")


def _axolotl_paths(t: Translation, prefix: str) -> Iterable[Any]:
    path, files = t.get(f"{prefix}path"), t.get(f"{prefix}data_files")
    if files is None:
        return [path]
    files = list(files) if isinstance(files, list) else [files]
    if path not in (None, "json", "csv", "parquet", "text"):
        files[-1] = f"{path}/{files[-1]}"
    return files


def _axolotl_format(t: Translation, key: str) -> None:
    kind = t.get(key)
    if kind is None:
        return
    text = str(kind).partition(".")[0].partition(":")[0]
    formats = {
        "alpaca": "alpaca",
        "chat_template": "chat",
        "sharegpt": "chat",
        "completion": "plain",
    }
    if text in formats:
        t.put(key, "--prompt-format", formats[text])
        if text == "completion" and not t.has("--loss-on"):
            t.put(key, "--loss-on", "everything")
    elif t.get("rl"):
        t.harmless(key, "prompt, chosen and rejected are recognised, or their columns named")
    else:
        t.lose(
            key,
            f"there is no format {text}: --prompt-format has chat, alpaca and plain, "
            "--chat-template any other",
        )


FUNCTIONS = {
    name: rule
    for name, rule in list(globals().items())
    if getattr(rule, "__module__", "") == __name__ and name[0] != "_"
}
"""This file's functions, by the names that tables use after an @."""
