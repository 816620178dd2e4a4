"""Reading and writing of adapters in peft's format.

A folder contains ``adapter_config.json`` and ``adapter_model.safetensors``. The latter has matrices
A [r, I] and B [O, r] for each linear module of the Hugging Face model, DoRA magnitudes [O], and
whole tensors of other trained modules (``modules_to_save``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import regex
import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import ConfigError, ModelConfig
from megatron.config.flags import option
from megatron.features.adapters.checkpoint import AdaptedSource
from megatron.features.adapters.flags import AdapterConfig, is_adapter
from megatron.features.adapters.peft_tensors import (
    EMBEDDING,
    KINDS,
    PREFIX,
    WEIGHTS,
    PeftTensors,
    Place,
    ends,
    head_of,
    module_name,
    places,
    wrappers,
)
from megatron.formats.conversion.commands import (
    LoadConfig,
    located,
    parsed,
    require_equal,
    required,
)
from megatron.formats.conversion.output import published
from megatron.formats.huggingface import architecture_of
from megatron.formats.huggingface.source import copy_tokenizer, tokenizer_in
from megatron.formats.tensors import DTYPES, finite, save_tensors

CONFIG = "adapter_config.json"
_PATTERN_SECONDS = 0.2
_TASKS = {"lm": "CAUSAL_LM"}
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations (``init_lora_weights``) that also change the base model's weights."""
# Keys that must not be set, and what they would mean.
_REFUSED = {
    "layer_replication": "blocks of the base are repeated",
    "use_qalora": "QA-LoRA has another formula",
    "use_bdlora": "BD-LoRA has another formula",
    "lora_bias": "additions have biases",
    "alora_invocation_tokens": "adapters act from a token on (aLoRA)",
    "arrow_config": "adapters are mixed (Arrow)",
    "kasa_config": "KaSA has another formula",
    "monteclora_config": "MonteCLoRA has another formula",
    "velora_config": "VeLoRA has another formula",
    "megatron_config": "adapters of Megatron's own layers",
}


class PeftFolder(AdaptedSource):
    """Folder in peft's format, presented as the model merged with its adapters."""

    title = "adapters of peft"

    def __init__(self, folder: Path, base: str | Path | None = None) -> None:
        super().__init__(folder, base)
        content = _content(folder)
        self.adapters = _adapters(content, folder / CONFIG)
        self._content = content
        additions = PeftTensors(folder, self.base, content, self._scale)
        self.additions, self.model = additions, additions.model
        self.tokenizer = tokenizer_in(folder) or self.base.tokenizer
        # a pattern, which --lora-targets does not support
        if isinstance(content.get("target_modules"), str):
            present = set(additions.names())
            used = [
                module
                for module, place in places(self.model).items()
                if place.name("a") in present and not place.target.stacked
            ]
            targets = (
                *target_modules(used, self.model), *(content.get("target_parameters") or ())
            )  # fmt: skip
            self.adapters = replace(self.adapters, lora_targets=targets)

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        return path if (path / CONFIG).is_file() else None

    @classmethod
    def family(cls, folder: Path, base: str | Path | None = None) -> str:
        return cls.locate_base(folder, base).family

    @classmethod
    def base_of(cls, folder: Path) -> str:
        return str(_content(folder).get("base_model_name_or_path"))

    @classmethod
    def locate_base(cls, folder: Path, base: str | Path | None) -> FoundCheckpoint:
        _adapters(_content(folder), folder / CONFIG)
        named = cls.base_of(folder)
        if base is None and os.path.exists(named) and not os.path.isdir(named):
            # The folder may be untrusted: do not open arbitrary files that it names.
            raise CheckpointError(
                f"{folder / CONFIG}: base_model_name_or_path {named} is not a folder: name the "
                "base by --pretrained-checkpoint"
            )
        return super().locate_base(folder, base)

    def alpha_of(self, weight: str, part: str) -> float:
        """Return an adapter's alpha, which ``alpha_pattern`` may set by module name."""
        return self._alpha(self._modules[weight, part])

    def _alpha(self, module: str) -> float:
        for pattern, value in (self._content.get("alpha_pattern") or {}).items():
            if _matches(pattern, module, self.folder / CONFIG):
                return float(value)
        return self.adapters.alpha

    def _scale(self, module: str, rank: int) -> float:
        return self.adapters.scale_of(rank, self._alpha(module))

    @cached_property
    def _modules(self) -> dict[tuple[str, str], str]:
        """Hugging Face module names by this project's weight name and its part."""
        modules = places(self.model)
        return {(f"{p.layer}.weight", p.target.part): name for name, p in modules.items()}

    def copy_tokenizer(self, target: Path) -> bool:
        return copy_tokenizer(self.folder, target) or self.base.copy_tokenizer(target)


def _matches(pattern: str, module: str, path: Path) -> bool:
    """Return whether a peft pattern matches a module. Raises CheckpointError if the pattern is
    invalid or too slow."""
    try:
        match = regex.match(rf"(.*\.)?({pattern})$", module, timeout=_PATTERN_SECONDS)
    except (regex.error, RecursionError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: alpha_pattern has {pattern[:80]!r}, which is not a regular expression: "
            f"{str(error)[:80]}"
        ) from None
    except TimeoutError:
        raise CheckpointError(
            f"{path}: alpha_pattern has {pattern[:80]!r}, which takes longer than "
            f"{_PATTERN_SECONDS} s on {module}"
        ) from None
    return match is not None


def _content(folder: Path) -> dict[str, Any]:
    content = read_json(folder / CONFIG, lenient=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / CONFIG} is not a JSON object")
    return content


def _adapters(content: Mapping[str, Any], path: Path) -> AdapterConfig:
    """Convert a peft configuration to flags. Raises CheckpointError if its adapters are not LoRA,
    or use unsupported options."""
    kind = content.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type is {kind!r}; only LORA can be read")
    for key, meaning in _REFUSED.items():
        if content.get(key):
            raise CheckpointError(f"{path}: {key} is {content[key]!r}: {meaning}, not supported")
    if content.get("bias", "none") != "none":
        raise CheckpointError(
            f"{path}: bias is {content['bias']!r}: biases of the base were trained, not supported"
        )
    init = content.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights is {init!r}, for which peft changes the base too; save the "
            "adapters with path_initial_model_for_weight_conversion, as peft's documentation says"
        )
    rank, alpha, targets = (content.get(key) for key in ("r", "lora_alpha", "target_modules"))
    dropout = content.get("lora_dropout") or 0.0
    numbers = [n for n in (alpha, dropout) if isinstance(n, int | float) and abs(n) < 1e9]
    if type(rank) is not int or rank < 1 or len(numbers) < 2:
        raise CheckpointError(
            f"{path}: r is {rank!r:.40}, lora_alpha {alpha!r:.40}, lora_dropout {dropout!r:.40}; "
            "expected numbers"
        )
    alphas = content.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not {type(n) for n in alphas.values()} <= {int, float}:
        raise CheckpointError(
            f"{path}: alpha_pattern is {alphas!r:.60}; expected numbers by patterns"
        )
    if isinstance(targets, str):
        content = {**content, "target_modules": [targets]}
    modules, parameters, _ = (
        _listed(content, key, path)
        for key in ("target_modules", "target_parameters", "modules_to_save")
    )
    tokens = content.get("trainable_token_indices") or []
    lists = list(tokens.values()) if isinstance(tokens, dict) else [tokens]
    if not all(
        isinstance(each, list) and all(type(n) is int and 0 <= n < 2**31 for n in each)
        for each in lists
    ):
        raise CheckpointError(
            f"{path}: trainable_token_indices is {tokens!r:.60}; expected a list of tokens, or one "
            "for each module"
        )
    return AdapterConfig(
        lora=True,
        lora_rank=rank,
        lora_alpha=float(numbers[0]),
        lora_targets=(*modules, *parameters),
        lora_dropout=float(numbers[1]),
        use_rslora=bool(content.get("use_rslora")),
        use_dora=bool(content.get("use_dora")),
    )


def _listed(content: Mapping[str, Any], key: str, path: Path) -> list[str]:
    names = content.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: {key} is {names!r:.60}; expected a list of names")
    return names


def write_peft(
    source: AdaptedSource, folder: Path, base: str | None = None, dtype: torch.dtype = torch.float32
) -> int:
    """Write the adapters of a source into an existing folder, and return the number of tensors.
    ``base`` is recorded as the path or name of the base model; the default is the path of the
    source's base if that is a Hugging Face folder. Raises ValueError if the base has no Hugging
    Face architecture or a tensor is not finite in ``dtype``, and OSError if writing fails."""
    model, adapters, additions = source.model, source.adapters, source.additions
    present = set(additions.names())
    targets = {name: place for name, place in places(model).items() if place.name("a") in present}
    parameters = [name for name, place in targets.items() if place.target.stacked]
    written = {place.name(kind) for place in targets.values() for kind in KINDS.values()}
    if others := sorted(name for name in present - written if is_adapter(name)):
        raise ConfigError(
            f"{source.folder} has adapters of a layer that models of Hugging Face do not have "
            f"({others[0]}): convert_checkpoint.py to-hf writes the merged model"
        )
    ranks, alphas = _patterns(source, targets, parameters)
    whole = _whole_tensors(source, dtype)
    # Whole tensors of modules with an adapter equal those of the base.
    whole = {name: values for name, values in whole.items() if _module_of(name) not in targets}
    saved = [_module_of(name) for name in whole]
    tied = model.embedding.tied and EMBEDDING in present
    if tied:
        name = module_name(head_of(model))
        whole[name] = finite(EMBEDDING, additions.tensor(EMBEDDING), dtype, source.folder).clone()
    tensors = _low_rank_tensors(source, targets, parameters, dtype)
    tensors |= {PREFIX + name: values for name, values in whole.items()}
    save_tensors(tensors, folder / WEIGHTS[0], {"format": "pt"})
    if base is None and (source.base.folder / "config.json").is_file():
        base = str(source.base.folder)
    linear = [name for name in targets if name not in parameters]
    content = {
        "peft_type": "LORA",
        "task_type": _TASKS.get(model.head, "SEQ_CLS"),
        "base_model_name_or_path": base,
        "r": adapters.lora_rank,
        "lora_alpha": _number(adapters.alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        # peft does not accept dropout with target parameters.
        "lora_dropout": 0.0 if parameters else adapters.lora_dropout,
        "target_modules": target_modules(linear, model),
        "modules_to_save": target_modules(saved, model, str.endswith) or None,
        # Otherwise peft would train a copy of a tied embedding and leave the head unchanged.
        "ensure_weight_tying": tied,
        "bias": "none",
        "fan_in_fan_out": architecture_of(model).model_type == "gpt2",
        "use_rslora": adapters.use_rslora,
        "use_dora": adapters.use_dora,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    if parameters:
        # Names of expert parameters without their block's name, such as mlp.experts.down_proj.
        content["target_parameters"] = sorted({".".join(n.split(".")[-3:]) for n in parameters})
    write_json(folder / CONFIG, content)
    return len(tensors)


def _patterns(
    source: AdaptedSource, targets: Mapping[str, Place], parameters: Sequence[str]
) -> tuple[dict[str, int], dict[str, int | float]]:
    """Return the ranks and the alphas of the modules whose values differ from the run's."""
    ranks, alphas = dict[str, int](), dict[str, int | float]()
    for target in wrappers(targets, parameters):
        place = targets[target]
        rank = source.additions.shape(place.name("a"))[-2]
        alpha = source.alpha_of(f"{place.layer}.weight", place.target.part)
        if rank != source.adapters.lora_rank:
            ranks[re.escape(target)] = rank
        if alpha != source.adapters.alpha:
            alphas[re.escape(target)] = _number(alpha)
    return ranks, alphas


def _low_rank_tensors(
    source: AdaptedSource,
    targets: Mapping[str, Place],
    parameters: Sequence[str],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the matrices of all adapters, and DoRA's magnitudes, by their names in peft's file."""
    tensors, present = dict[str, Tensor](), set(source.additions.names())
    for target, module in wrappers(targets, parameters).items():
        for theirs, kind in KINDS.items():
            name = targets[target].name(kind)
            if name in present:
                values = finite(name, source.additions.tensor(name), dtype, source.folder)
                ending = "" if kind == "magnitude" else ".weight"
                stored = targets[target].to_peft(values, kind)
                tensors[f"{PREFIX}{module}.lora_{theirs}{ending}"] = stored
    return tensors


def _whole_tensors(source: AdaptedSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the fully trained parameters, by tensor name in the Hugging Face model."""
    present, tensors = set(source.additions.names()), dict[str, Tensor]()
    for parameter in architecture_of(source.model).parameters(source.model):
        if (name := parameter.ours) in present:
            values = finite(name, source.additions.tensor(name), dtype, source.folder)
            for theirs, stored in parameter.to_hf(values).items():
                tensors[module_name(theirs)] = stored
    return tensors


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _number(value: float) -> int | float:
    """Return a number as peft writes it, with integral values as integers."""
    return int(value) if value == int(value) else value


def target_modules(
    used: Sequence[str], model: ModelConfig, matches: Callable[[str, str], bool] = ends
) -> list[str]:
    """Return the shortest module name endings with which peft selects exactly the modules ``used``.
    ``matches`` tells whether peft considers that a module has an ending."""
    everything = {
        module_name(theirs).removesuffix(".weight")
        for parameter in architecture_of(model).parameters(model)
        for theirs in parameter.theirs
        if theirs.endswith(".weight")
    }
    wanted, endings = set(used), list[str]()
    for module in used:
        if not any(matches(module, ending) for ending in endings):
            endings.append(
                next(
                    ending
                    for ending in _endings(module)
                    if all(other in wanted for other in everything if matches(other, ending))
                )
            )
    return sorted(endings)


def _endings(module: str) -> Iterator[str]:
    words = module.split(".")
    return (".".join(words[-length:]) for length in range(1, len(words) + 1))


@dataclass(frozen=True)
class ToPeftConfig:
    """Conversion of adapters to peft's format."""

    output: str | None = option(None)
    """Folder for the adapters. It must be new or empty."""
    base_model: str | None = option(None, derived="the base, if it is of Hugging Face")
    """Name or path to record for the base model, for example meta-llama/Llama-2-7b-hf."""
    dtype: str = option("float32", choices=tuple(DTYPES))
    """Dtype of the adapters."""
    overwrite: bool = option(False)
    """Overwrite the adapters in --output."""


def to_peft(argv: Sequence[str]) -> None:
    """Convert adapters to peft's format. They are read back and compared before the folder gets its
    final name. Raises ConfigError, CheckpointError or OSError if a flag or file cannot be used."""
    checkpoint, config = parsed(
        argv, "to-peft", "Writes the adapters of a checkpoint as a folder of peft.",
        LoadConfig, ToPeftConfig,
    )  # fmt: skip
    required(checkpoint, "load")
    output, located_checkpoint = Path(required(config, "output")), located(checkpoint)
    if not located_checkpoint.form.on_base:
        raise ConfigError(
            f"--load {checkpoint.load} has a whole model, not adapters: to-hf writes it for "
            "transformers"
        )
    source = located_checkpoint.open()
    assert isinstance(source, AdaptedSource)
    with published(output, config.overwrite, located_checkpoint.folder, marks=(CONFIG,)) as folder:
        count = write_adapters(source, folder, config.base_model, DTYPES[config.dtype])
    print(
        f"{output}: {count} tensors of {source.folder} in {config.dtype}, read back and equal; "
        f"base: {source.base.folder}"
    )


def write_adapters(
    source: AdaptedSource, folder: Path, base: str | None = None, dtype: torch.dtype = torch.float32
) -> int:
    """Write adapters with :func:`write_peft` and the tokenizer's files into an existing folder, and
    read the adapters back. Raises CheckpointError if they differ."""
    count = write_peft(source, folder, base, dtype)
    written = PeftFolder(folder, source.base.folder).additions
    require_equal(written, source.additions, dtype, folder)
    place = folder / "tokenizer"
    if source.copy_tokenizer(place):
        for path in place.iterdir():
            if path.name == "generation_config.json":
                path.unlink()
            else:
                path.rename(folder / path.name)
        place.rmdir()
    return count
