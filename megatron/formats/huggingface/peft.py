"""Folders of peft: adapters by the names of Hugging Face's modules, read and written.

``adapter_config.json`` says what they are, ``adapter_model.safetensors`` has a matrix A [r, I] and
a matrix B [O, r] for each linear module, with DoRA its magnitudes [O], and whole tensors of modules
that were trained beside them (``modules_to_save``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import regex
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.adapters import AdaptedSource, adapter_name
from megatron.checkpoint.files import CheckpointError, finite, read_json, write_json
from megatron.checkpoint.source import FoundCheckpoint, Source
from megatron.config import ModelConfig
from megatron.config.adapters import AdapterConfig
from megatron.formats.huggingface.adapter_targets import LinearTarget, linear_targets
from megatron.formats.huggingface.architecture import Architecture, Parameter
from megatron.formats.huggingface.registry import architecture_of
from megatron.formats.huggingface.source import copy_tokenizer
from megatron.formats.unpickle import load_pickle

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_PATTERN_SECONDS = 0.2
_TENSOR = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)(?:\.\w+)??(?:\.weight)?")
_KINDS = {"A": "a", "B": "b", "magnitude_vector": "magnitude"}
_TASKS = {"lm": "CAUSAL_LM"}
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations (``init_lora_weights``) that change the base too."""
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
    "target_parameters": "adapters of parameters that are in no linear module",
    "trainable_token_indices": "single rows of the embedding were trained",
    "megatron_config": "adapters of Megatron's own layers",
}
"""Keys that may not have a value here, and what it would mean."""


class Place(NamedTuple):
    """Where an adapter is: its block's layer by canonical name, and the module that it is of."""

    layer: str
    target: LinearTarget

    def name(self, kind: str) -> str:
        """The canonical name of one of its parameters, ``kind`` a, b or magnitude."""
        part = f"{self.target.part}_" if self.target.part else ""
        return f"{self.layer}.lora_{part}{kind}"


def places(model: ModelConfig) -> dict[str, Place]:
    """The linear modules of all blocks of a model, by the names of Hugging Face."""
    stacks = architecture_of(model).stacks
    found = {}
    for target in linear_targets(model):
        for n in range(stacks[target.layer.partition(".{n}.")[0]](model)):
            found[target.module.format(n=n)] = Place(target.layer.format(n=n), target)
    return found


class PeftFolder(AdaptedSource):
    """A folder of peft, as the model merged with its adapters."""

    title = "adapters of peft"

    def __init__(self, folder: Path, base: str | Path | None = None) -> None:
        super().__init__(folder, base)
        self.model, self.tokenizer = self.base.model, self.base.tokenizer
        content = _content(folder)
        self.adapters = _adapters(content, folder / CONFIG)
        self._content = content
        self.additions = PeftTensors(folder, self.model)
        if isinstance(content.get("target_modules"), str):  # a pattern, which flags do not take
            present = set(self.additions.names())
            used = [m for m, place in places(self.model).items() if place.name("a") in present]
            targets = tuple(target_modules(used, self.model))
            self.adapters = replace(self.adapters, lora_targets=targets)

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        return path if (path / CONFIG).is_file() else None

    @classmethod
    def family(cls, folder: Path, base: str | Path | None = None) -> str:
        found = cls.locate_base(folder, base)
        return found.family

    @classmethod
    def base_of(cls, folder: Path) -> str:
        return str(_content(folder).get("base_model_name_or_path"))

    @classmethod
    def locate_base(cls, folder: Path, base: str | Path | None) -> FoundCheckpoint:
        _adapters(_content(folder), folder / CONFIG)
        return super().locate_base(folder, base)

    def alpha_of(self, weight: str, part: str) -> float:
        """As :meth:`AdaptedSource.alpha_of`, with the patterns of ``alpha_pattern``."""
        module = self._modules[weight, part]
        for pattern, value in (self._content.get("alpha_pattern") or {}).items():
            if _matches(pattern, module, self.folder / CONFIG):
                return float(value)
        return self.adapters.alpha

    @cached_property
    def _modules(self) -> dict[tuple[str, str], str]:
        """Names of modules by our weight and the part of it that they are."""
        found = places(self.model)
        return {(f"{p.layer}.weight", p.target.part): name for name, p in found.items()}

    def copy_tokenizer(self, target: Path) -> bool:
        return copy_tokenizer(self.folder, target) or self.base.copy_tokenizer(target)


class PeftTensors(Source):
    """The tensors of a folder of peft by canonical name, float32, the rows in our order. Raises
    CheckpointError if there is one that is not known."""

    title = "tensors of peft"

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        super().__init__(folder)
        self.model = model
        found = next((name for name in WEIGHTS if (folder / name).is_file()), None)
        if found is None:
            raise CheckpointError(f"{folder} has none of {', '.join(WEIGHTS)}")
        self._path = folder / found
        self._tensors = _opened(self._path)
        modules, whole = places(model), _whole(architecture_of(model), model)
        self._stored: dict[str, tuple[str, Place | Parameter]] = {}
        for key in self._tensors:
            name = key.removeprefix(_PREFIX)
            match = _TENSOR.fullmatch(name)
            if match is not None and match[1] in modules:
                place = modules[match[1]]
                self._stored[place.name(_KINDS[match[2]])] = key, place
            elif match is None and (parameter := whole.get(_unwrapped(name))) is not None:
                self._stored[parameter.ours] = key, parameter
            else:
                raise CheckpointError(
                    f"{self._path}: {key} is of no linear layer of the blocks of the base "
                    f"({architecture_of(model).title}), and cannot be represented"
                )

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        return None  # not a model by itself

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)

    def kinds(self, name: str) -> Sequence[str]:
        return ("weight",)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        if name not in self._stored:
            raise CheckpointError(f"{self._path} has no {name}")
        key, place = self._stored[name]
        try:
            values = self._tensors[key]().float()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path}: {key}: {error}") from None
        if isinstance(place, Parameter):
            return place.from_hf([values])
        parsed = adapter_name(name)
        assert parsed is not None
        return values.contiguous() if parsed.kind == "a" else place.target.rows_from_hf(values)


def _whole(architecture: Architecture, model: ModelConfig) -> dict[str, Parameter]:
    """The parameters outside the blocks that are one tensor of theirs, by its name."""
    found = {}
    for parameter in architecture.parameters(model):
        if parameter.entry.stack is None and len(parameter.theirs) == 1:
            found[parameter.theirs[0]] = parameter
    return found


def _matches(pattern: str, module: str, path: Path) -> bool:
    """Whether a pattern of peft is of a module. Raises CheckpointError if it is none, or one that
    does not end soon."""
    try:
        found = regex.match(rf"(.*\.)?({pattern})$", module, timeout=_PATTERN_SECONDS)
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
    return found is not None


def _unwrapped(name: str) -> str:
    """The name of a tensor of ``modules_to_save`` without what peft's wrapper adds."""
    return re.sub(r"\.(modules_to_save(\.\w+)?|original_module)\.", ".", name)


def _opened(path: Path) -> Mapping[str, Any]:
    """By key of a tensor in a file: a function that reads it."""
    if path.suffix != ".safetensors":
        return {key: (lambda value=value: value) for key, value in load_pickle(path).items()}
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return {key: (lambda key=key: file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118


def _content(folder: Path) -> dict[str, Any]:
    content = read_json(folder / CONFIG, lenient=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / CONFIG} is not a JSON object")
    return content


def _adapters(content: Mapping[str, Any], path: Path) -> AdapterConfig:
    """What a configuration of peft describes. Raises CheckpointError if it is no LoRA, or one that
    cannot be represented."""
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
    targets = [targets] if isinstance(targets, str) else targets or []
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise CheckpointError(
            f"{path}: target_modules is {targets!r:.60}; expected a list of names"
        )
    return AdapterConfig(
        lora=True,
        lora_rank=rank,
        lora_alpha=float(numbers[0]),
        lora_targets=tuple(targets),
        lora_dropout=float(numbers[1]),
        use_rslora=bool(content.get("use_rslora")),
        use_dora=bool(content.get("use_dora")),
    )


def write_peft(
    source: AdaptedSource, folder: Path, base: str | None = None, dtype: torch.dtype = torch.float32
) -> int:
    """Writes the adapters of a source into an existing folder, for a base by the path or name
    ``base`` (by default the source's, if it is a Hugging Face folder); returns the number of
    tensors. Raises ValueError if the base is of no Hugging Face architecture, or a tensor is not
    finite in ``dtype``; OSError if a file cannot be written."""
    model, adapters, additions = source.model, source.adapters, source.additions
    present = set(additions.names())
    tensors: dict[str, Tensor] = {}
    used: list[str] = []
    ranks, alphas = dict[str, int](), dict[str, float]()
    for module, place in places(model).items():
        if place.name("a") in present:
            used.append(module)
            rank = additions.shape(place.name("a"))[0]
            alpha = source.alpha_of(f"{place.layer}.weight", place.target.part)
            if rank != adapters.lora_rank:
                ranks[re.escape(module)] = rank
            if alpha != adapters.alpha:
                alphas[re.escape(module)] = _number(alpha)
            for theirs, kind in _KINDS.items():
                name = place.name(kind)
                if name in present:
                    values = finite(name, additions.tensor(name), dtype, source.folder)
                    if kind != "a":
                        values = place.target.rows_to_hf(values)
                    ending = "" if kind == "magnitude" else ".weight"
                    key = f"{_PREFIX}{module}.lora_{theirs}{ending}"
                    tensors[key] = values.contiguous()
    saved = []
    for theirs, parameter in _whole(architecture_of(model), model).items():
        if parameter.ours in present:
            whole = finite(theirs, additions.tensor(parameter.ours), dtype, source.folder)
            (values,) = parameter.to_hf(whole).values()
            tensors[_PREFIX + theirs] = values.contiguous()
            saved.append(theirs.rpartition(".")[0].rpartition(".")[2])
    if base is None:
        found = source.base.folder
        base = str(found) if (found / "config.json").is_file() else None
    path = folder / WEIGHTS[0]
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written: {error}") from None
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": _TASKS.get(model.head, "SEQ_CLS"),
            "base_model_name_or_path": base,
            "r": adapters.lora_rank,
            "lora_alpha": _number(adapters.alpha),
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "lora_dropout": adapters.lora_dropout,
            "target_modules": target_modules(used, model),
            "modules_to_save": sorted(set(saved)) or None,
            "bias": "none",
            "fan_in_fan_out": architecture_of(model).model_type == "gpt2",
            "use_rslora": adapters.use_rslora,
            "use_dora": adapters.use_dora,
            "init_lora_weights": True,
            "inference_mode": True,
        },
    )
    return len(tensors)


def _number(value: float) -> int | float:
    """As peft writes it: whole numbers without a point."""
    return int(value) if value == int(value) else value


def target_modules(used: Sequence[str], model: ModelConfig) -> list[str]:
    """The shortest endings of module names that peft takes for these modules and no others."""
    everything = {
        theirs.removesuffix(".weight")
        for parameter in architecture_of(model).parameters(model)
        for theirs in parameter.theirs
        if theirs.endswith(".weight")
    }
    wanted, endings = set(used), list[str]()
    for module in used:
        if not any(_ends(module, ending) for ending in endings):
            endings.append(
                next(
                    ending
                    for ending in _endings(module)
                    if all(other in wanted for other in everything if _ends(other, ending))
                )
            )
    return sorted(endings)


def _ends(module: str, ending: str) -> bool:
    return f".{module}".endswith(f".{ending}")


def _endings(module: str) -> Iterator[str]:
    words = module.split(".")
    return (".".join(words[-length:]) for length in range(1, len(words) + 1))
