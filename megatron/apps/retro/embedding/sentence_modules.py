"""What a folder of sentence-transformers does with the states of its encoder: ``modules.json`` and
the folders that it names. The package itself is not needed.

Shape suffixes: B texts, S tokens, H hidden, V vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megatron.config import ConfigError
from megatron.formats.unpickle import load_pickle
from megatron.util.files import read_regular
from megatron.util.json_text import parse_json

LIST = "modules.json"
Pooling = Callable[[Tensor, Tensor], Tensor]
"""From states [B, S, H], padded on the right, and their lengths [B] to vectors [B, V]."""
VectorStep = Callable[[Tensor], Tensor]
"""From vectors [B, V] to others."""


class SentenceModules(NamedTuple):
    """How a folder's texts become vectors.

    Attributes:
        encoder: folder of the transformer.
        max_length: tokens that are read of a text, special ones included; None where it is not
            said.
        lower_case: whether texts are lower-cased before they are tokenized.
        prompt: put before each text.
        steps: what follows the pooling.
        weights: of the steps, by name.
        description: what the settings say of all this, as JSON.
    """

    encoder: Path
    max_length: int | None
    lower_case: bool
    prompt: str
    pooling: Pooling
    steps: tuple[VectorStep, ...]
    weights: dict[str, Tensor]
    description: list[Any]

    def vectors(self, states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
        """[B, V] of the states of texts."""
        found_BV = self.pooling(states_BSH, lengths_B)
        for step in self.steps:
            found_BV = step(found_BV)
        return found_BV


def read_modules(folder: Path, flag: str, device: torch.device) -> SentenceModules:
    """The modules of a folder with :data:`LIST`. Raises ConfigError, naming ``flag``, if it has one
    that is not known here; OSError or ValueError if a file is missing or malformed."""
    entries = parse_json(read_regular(folder / LIST), f"{flag}: {folder / LIST}", lenient=True)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError(
            f"{flag}: {folder / LIST} is not a list of modules, each with its type and the path of "
            "a folder beside it"
        )
    kinds = [entry["type"].rpartition(".")[2] for entry in entries]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ConfigError(
            f"{flag}/{LIST} begins with {', '.join(kinds[:2])}; a Transformer and its Pooling are "
            "what can be used"
        )
    parts = [folder / entry["path"] for entry in entries]
    named = list(zip(kinds, parts, strict=True))
    steps: list[VectorStep] = []
    weights: dict[str, Tensor] = {}
    for kind, part in named[2:]:
        if kind == "Normalize":
            steps.append(_normalize)
        elif kind == "Dense":
            own = {name: tensor.to(device) for name, tensor in _tensors(part).items()}
            steps.append(_dense(_content(part / "config.json"), own, f"{flag}/{part.name}"))
            weights |= {f"{part.name}.{name}": tensor for name, tensor in own.items()}
        else:
            raise ConfigError(
                f"{flag}/{LIST} has a module {kind}; Transformer, Pooling, Dense and Normalize are "
                "what can be used"
            )
    prompt = _prompt(_content(folder / "config_sentence_transformers.json"))
    settings = _content(parts[0] / "sentence_bert_config.json")
    return SentenceModules(
        parts[0],
        settings.get("max_seq_length"),
        bool(settings.get("do_lower_case")),
        prompt,
        _pooling(_content(parts[1] / "config.json"), f"{flag}/{parts[1].name}"),
        tuple(steps),
        weights,
        [settings, prompt, *([kind, _content(part / "config.json")] for kind, part in named[1:])],
    )


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        return False
    path = entry.get("path")
    return isinstance(path, str) and not set("/\\") & set(path) and path != ".."


def _content(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    found = parse_json(read_regular(path), str(path), lenient=True)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


def _prompt(settings: dict[str, Any]) -> str:
    name = settings.get("default_prompt_name")
    return "" if name is None else str((settings.get("prompts") or {})[name])


def _first(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    return states_BSH[:, 0]


def _last(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
    return states_BSH[rows_B, lengths_B - 1]


def _largest(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    return states_BSH.masked_fill(~_kept(states_BSH, lengths_B)[..., None], -torch.inf).amax(1)


def _mean(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    weights_BS = _kept(states_BSH, lengths_B).to(states_BSH.dtype)
    return _weighted(states_BSH, weights_BS, lengths_B)


def _mean_by_root(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    weights_BS = _kept(states_BSH, lengths_B).to(states_BSH.dtype)
    return _weighted(states_BSH, weights_BS, lengths_B.to(states_BSH.dtype).sqrt())


def _mean_by_place(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    places_S = torch.arange(1, states_BSH.shape[1] + 1, device=states_BSH.device)
    weights_BS = (places_S * _kept(states_BSH, lengths_B)).to(states_BSH.dtype)
    return _weighted(states_BSH, weights_BS, weights_BS.sum(1))


def _weighted(states_BSH: Tensor, weights_BS: Tensor, sums_B: Tensor) -> Tensor:
    return torch.einsum("bs,bsh->bh", weights_BS / sums_B[:, None], states_BSH)


def _kept(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    places_S = torch.arange(states_BSH.shape[1], device=states_BSH.device)
    return places_S < lengths_B[:, None]


_POOLINGS: dict[str, Pooling] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _mean_by_place,
    "lasttoken": _last,
}
_OLD_KEYS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}
"""Of older versions, where each pooling has a key of its own; several are concatenated in this
order."""


def _pooling(settings: dict[str, Any], where: str) -> Pooling:
    named = settings.get("pooling_mode")
    if named is None:
        old = {name: f"pooling_mode_{key}" for name, key in _OLD_KEYS.items()}
        named = [name for name, key in old.items() if settings.get(key)] or ["mean"]
    names: Sequence[str] = [named] if isinstance(named, str) else named
    unknown = [name for name in names if name not in _POOLINGS]
    if unknown or settings.get("include_prompt") is False:
        shown = f"pooling_mode {unknown[0]}" if unknown else "include_prompt false"
        raise ConfigError(
            f"{where}/config.json: {shown} cannot be used; poolings are {', '.join(_POOLINGS)}, of "
            "the prompt, too"
        )
    chosen = [_POOLINGS[name] for name in names]
    return lambda states, lengths: torch.cat([pool(states, lengths) for pool in chosen], 1)


def _normalize(vectors_BV: Tensor) -> Tensor:
    return F.normalize(vectors_BV, dim=1)


def _dense(settings: dict[str, Any], weights: dict[str, Tensor], where: str) -> VectorStep:
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = getattr(torch.nn, name.rpartition(".")[2], None)
    if not name.startswith("torch.nn.") or kind is None or settings.get("use_residual"):
        shown = "use_residual" if settings.get("use_residual") else f"activation_function {name}"
        raise ConfigError(
            f"{where}/config.json: {shown} cannot be used; activations are those of torch.nn, "
            "without a residual"
        )
    activation = kind()
    weight, bias = weights["linear.weight"], weights.get("linear.bias")
    return lambda vectors_BV: activation(F.linear(vectors_BV, weight.to(vectors_BV), bias))


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    if path.is_file():
        return load_file(path)
    found: dict[str, Tensor] = load_pickle(folder / "pytorch_model.bin")
    return found
