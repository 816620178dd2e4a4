"""A Llama as Meta publishes it: ``params.json``, and a ``consolidated.*.pth`` of each of the
model-parallel ranks that it was trained on.

Meta's file leaves some values to the program that reads it. They are chosen as in Meta's program
and transformers' conversion, and a note lists them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_bytes, read_json
from megatron.config import ModelConfig, TokenizerConfig
from megatron.formats.generation_settings import with_ends, write_generation
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.source import TableSource, shapes_of
from megatron.formats.legacy_megatron.arguments import write_tokenizer
from megatron.formats.unpickle import load_pickle
from megatron.tokenizer import build_tokenizer

PARAMS = "params.json"
_RANK = re.compile(r"consolidated\.(\d+)\.pth")
_WHOLE = "consolidated.safetensors"
_CHECKSUMS = "checklist.chk"
_TOKENIZER = "tokenizer.model"
_BUFFERS = re.compile(r"rope\.freqs|layers\.\d+\.attention\.inner_attention\.rope\.freqs")
"""Tensors that follow from params.json."""
_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}
"""Meta's names of layers by Hugging Face's."""


class MetaFolder(TableSource):
    """A folder with params.json and ``consolidated.00.pth`` to ``consolidated.NN.pth``, or one
    ``consolidated.safetensors``. Files are mapped into memory; a tensor is read when it is needed.
    Raises CheckpointError if a file is missing or damaged, tensors are missing, superfluous or of
    another shape, or params.json has a value that cannot be represented."""

    title = "Llama of Meta"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = _files_of(folder)
        self._ranks = [_open(path) for path in self._files]
        path = folder / PARAMS
        params = read_params(read_json(path, lenient=True), path)
        self.notes = list(params.notes)
        config = params.config(self._vocabulary(), self._is_tied())
        architecture = architecture_named(config, path)
        self.model: ModelConfig = architecture.model(config, path)
        if params.scaled and self.model.embedding.tied:
            self.notes.append(
                "head and token embedding are equal, so the rotary frequencies are scaled as those "
                "of Llama 3.2's models of 1B and 3B: by 32, not by 8"
            )
        self._parameters = {each.ours: each for each in architecture.parameters(self.model)}
        tensors = [theirs for each in self._parameters.values() for theirs in each.theirs]
        self._theirs = {theirs: _name_of(theirs) for theirs in tensors}
        self._check_names()
        self._shapes = shapes_of(self.model, path)
        self._wholes = {
            theirs: tuple(like.shape)
            for name, each in self._parameters.items()
            for theirs, like in each.to_hf(torch.empty(self._shapes[name], device="meta")).items()
        }
        for theirs in self._theirs:
            self._joining(theirs)
        places = (folder / _TOKENIZER, folder.parent / _TOKENIZER)
        self.tokenizer = next((tokenizer_of_file(p) for p in places if p.is_file()), None)

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        if path.name == PARAMS or _RANK.fullmatch(path.name) or path.name == _WHOLE:
            path = path.parent
        if not (path / PARAMS).is_file() or not _has_weights(path):
            return None
        if wanted is not None:
            raise CheckpointError(f"{path} is a Llama of Meta, and has no {wanted}")
        return path

    @classmethod
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        """Compares the files with Meta's checklist.chk, where it is there: lines of an MD5 sum and
        a name."""
        checklist = folder / _CHECKSUMS
        if not checklist.is_file():
            return
        lines = read_bytes(checklist).decode(errors="replace").split("\n")
        sums = [line.split() for line in lines if len(line.split()) == 2]
        for wanted, name in sums[share::shares]:
            path = folder / name
            if Path(name).name != name or not path.is_file():
                continue  # the tokenizer's sum, of a file that lies elsewhere
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
            if digest.hexdigest() != wanted.lower():
                raise CheckpointError(
                    f"{path} is damaged: its MD5 sum is {digest.hexdigest()}, {checklist.name} "
                    f"says {wanted}; download it again"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        self._parameter(name)
        return self._shapes[name]

    def dtype(self, name: str, kind: str = "weight") -> str:
        first = self._theirs[self._parameter(name).theirs[0]]
        return str(self._ranks[0][first].dtype).removeprefix("torch.")

    def copy_tokenizer(self, target: Path) -> bool:
        """See :meth:`Source.copy_tokenizer`; made of tokenizer.model, which is in the folder or
        the one above it."""
        rows = self.model.vocabulary.padded
        written = write_tokenizer(self.tokenizer, target, rows, str(self.folder))
        write_generation(target, self.generation)
        return written

    @property
    def generation(self) -> dict[str, Any]:
        """See :attr:`Source.generation`: Meta's programs end texts of Llama 3 at the end of a turn
        too, which no file says."""
        if self.tokenizer is None or self.tokenizer.tokenizer_type != "Llama3Tokenizer":
            return {}
        tokenizer = build_tokenizer(self.tokenizer)
        ends = [tokenizer.eos, *tokenizer.tokenize("<|eot_id|>")]
        return with_ends({}, (end for end in ends if end < self.model.vocabulary.size))

    def _vocabulary(self) -> int:
        """Rows of the head, which the ranks divide in every version."""
        name = "output.weight"
        if any(name not in rank or rank[name].dim() != 2 for rank in self._ranks):
            raise CheckpointError(f"{self._files[0]} has no {name}")
        return sum(rank[name].shape[0] for rank in self._ranks)

    def _is_tied(self) -> bool:
        """True if the head repeats the token embedding."""
        pairs = [(rank.get("tok_embeddings.weight"), rank["output.weight"]) for rank in self._ranks]
        return all(
            table is not None
            and table.shape == head.shape
            and torch.equal(table[:1], head[:1])  # the rest is seldom read
            and torch.equal(table, head)
            for table, head in pairs
        )

    def _check_names(self) -> None:
        """Raises CheckpointError if tensors are missing or superfluous."""
        wanted = set(self._theirs.values())
        if self.model.embedding.tied:
            wanted.add("output.weight")
        for path, rank in zip(self._files, self._ranks, strict=True):
            missing = sorted(wanted - set(rank))
            if missing:
                raise CheckpointError(f"{path} lacks {', '.join(missing[:5])}")
            foreign = sorted(name for name in set(rank) - wanted if not _BUFFERS.fullmatch(name))
            if foreign:
                raise CheckpointError(
                    f"{path} contains {', '.join(foreign[:5])}; a Llama as {PARAMS} describes it "
                    "has no such tensors"
                )

    def _joining(self, theirs: str) -> Callable[[Sequence[Tensor]], Tensor]:
        """The function that joins the ranks' shares of a tensor, by their shapes: rows or columns
        one after the other, or copies on every rank, or, with fewer key heads than ranks, on some
        neighbouring ranks."""
        name, wanted = self._theirs[theirs], self._wholes[theirs]
        shares = [rank[name] for rank in self._ranks]
        shapes, count = [tuple(share.shape) for share in shares], len(shares)
        if all(shape == wanted for shape in shapes):
            return lambda parts: parts[0]
        same = len(set(shapes)) == 1 and len(shapes[0]) == len(wanted)
        for dim in range(len(wanted) if same else 0):
            rest = shapes[0][:dim] + shapes[0][dim + 1 :]
            if rest != wanted[:dim] + wanted[dim + 1 :]:
                continue
            if shapes[0][dim] * count == wanted[dim]:
                return lambda parts, dim=dim: torch.cat(list(parts), dim)  # type: ignore[misc]
            if (
                dim == 0
                and wanted[0] % shapes[0][0] == 0
                and count % (wanted[0] // shapes[0][0]) == 0
            ):
                copies = count // (wanted[0] // shapes[0][0])
                return lambda parts: torch.cat(list(parts)[::copies])
        shown_shapes = " and ".join(dict.fromkeys(map(str, shapes)))
        raise CheckpointError(
            f"{self.folder}: {name} has the shape {shown_shapes} in {count} file"
            f"{'s' if count > 1 else ''}; {PARAMS} makes it {wanted}"
        )

    def _part(self, theirs: str) -> Tensor:
        """A tensor in Hugging Face's form."""
        values = self._joining(theirs)([rank[self._theirs[theirs]] for rank in self._ranks])
        heads = self._rotated_heads(theirs)
        if not heads:
            return values
        # Meta rotates channels 2i and 2i + 1 of a head together, Hugging Face i and i + D/2.
        rows, width = values.shape
        pairs = values.view(heads, rows // heads // 2, 2, width)
        return pairs.transpose(1, 2).reshape(rows, width)

    def _rotated_heads(self, theirs: str) -> int:
        """Number of heads whose rows Meta rotates in neighbouring pairs; 0 for none."""
        attention = self.model.attention
        if theirs.endswith("self_attn.q_proj.weight"):
            return attention.num_attention_heads
        return attention.num_query_groups if theirs.endswith("self_attn.k_proj.weight") else 0


def _name_of(theirs: str) -> str:
    """Meta's name of a tensor of Hugging Face."""
    layer = re.match(r"model\.(layers\.\d+\.)(.*)", theirs)
    prefix, inner = layer.groups() if layer else ("", theirs)
    return f"{prefix}{_NAMES[inner.removesuffix('.weight')]}.weight"


def _has_weights(folder: Path) -> bool:
    return (folder / _WHOLE).is_file() or any(
        _RANK.fullmatch(each.name) for each in folder.iterdir()
    )


def _files_of(folder: Path) -> list[Path]:
    """The files in the order of their ranks. Raises CheckpointError if one between is missing."""
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    numbers = sorted(
        int(match[1]) for each in folder.iterdir() if (match := _RANK.fullmatch(each.name))
    )
    for expected, number in enumerate(numbers):
        if number != expected:
            raise CheckpointError(f"{folder / f'consolidated.{expected:02d}.pth'} is missing")
    return [folder / f"consolidated.{number:02d}.pth" for number in numbers]


def _open(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    content = load_pickle(path)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CheckpointError(f"{path} does not contain tensors by name")
    return {name: value.detach() for name, value in content.items()}


def tokenizer_of_file(path: Path) -> TokenizerConfig:
    """Return the tokenizer of a ``tokenizer.model``: SentencePiece up to Llama 2, lines of
    byte-pair ranks since Llama 3. A folder of Hugging Face's files is accepted too."""
    if path.is_dir():
        return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(path))
    with path.open("rb") as file:
        ranks = re.match(rb"[A-Za-z0-9+/=]+ \d+\n", file.read(256)) is not None
    kind = "Llama3Tokenizer" if ranks else "Llama2Tokenizer"
    return TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path))


_KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size",
    "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    "sliding_window", "max_seq_len",
}  # fmt: skip
_HARMLESS = {"max_batch_size", "model_parallel_size", "use_biases"}
"""Sizes of Meta's buffers, and what is refused unless it is false."""


@dataclass(frozen=True)
class MetaParams:
    """Content of a params.json.

    Attributes:
        keys: keys of config.json, except those that the tensors show: vocabulary and tied head.
        scaled: True if the rotary frequencies are scaled as in Llama 3.1.
        notes: assumed values that the file lacks.
    """

    keys: dict[str, Any]
    scaled: bool
    notes: tuple[str, ...]

    def config(self, vocabulary: int, tied: bool) -> dict[str, Any]:
        """The config.json of a model with ``vocabulary`` tokens, with a tied head or not."""
        keys = {**self.keys, "vocab_size": vocabulary, "tie_word_embeddings": tied}
        if self.scaled:
            # Llama 3.2's small models are the only published ones with a tied head.
            keys["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": 32.0 if tied else 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        return keys


def read_params(content: Any, path: Path) -> MetaParams:
    """The parsed params.json at ``path``. Raises CheckpointError if a value is missing, malformed
    or of a model that cannot be represented."""
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = {**content, **content["model"], "model": None}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    unknown = [
        f"{name} = {value!r}"
        for name, value in content.items()
        if name not in _KNOWN | _HARMLESS or (name == "use_biases" and value)
        if value not in (None, False, {}, [], -1)
    ]
    if unknown:
        raise CheckpointError(
            f"{path}: {', '.join(unknown)}: such a Llama cannot be represented (experts, images "
            "and quantised weights cannot)"
        )
    given = _Params(content, path)
    hidden, heads = given.whole("dim"), given.whole("n_heads")
    window = content.get("sliding_window")
    # Mistral's files name the width of the MLP itself.
    mistral = window is not None or content.get("hidden_dim") is not None
    theta = given.number("rope_theta", 10_000.0)
    scaled = content.get("use_scaled_rope", False)
    if not isinstance(scaled, bool):
        raise CheckpointError(f"{path}: use_scaled_rope is {scaled!r}, expected true or false")
    keys: dict[str, Any] = {
        "model_type": "mistral" if mistral else "llama",
        "hidden_size": hidden,
        "intermediate_size": _ffn_size(given, hidden),
        "num_hidden_layers": given.whole("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": given.whole("n_kv_heads", heads),
        "head_dim": given.whole("head_dim", hidden // heads),
        "rms_norm_eps": given.number("norm_eps"),
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }
    if mistral:
        keys["sliding_window"] = None if window is None else given.whole("sliding_window")
    else:
        keys |= {"attention_bias": False, "mlp_bias": False}
    longest, notes = content.get("max_seq_len"), []
    if longest is None:
        longest = _longest(theta, scaled, mistral)
        notes.append(
            f"{path.name} does not say the longest sequence; it is taken as {longest:,} tokens"
        )
    keys["max_position_embeddings"] = longest
    return MetaParams(keys, scaled, tuple(notes))


def _longest(theta: float, scaled: bool, mistral: bool) -> int:
    """Longest sequence of published models: Mistral, Llama 3.1 and later, whose rotary frequencies
    are scaled, and, by the base of these, Llama 2, Llama 3, and Code Llama and others."""
    if mistral:
        return 32_768
    return 131_072 if scaled else {10_000.0: 4096, 500_000.0: 8192}.get(theta, 16_384)


def _ffn_size(given: _Params, hidden: int) -> int:
    """Width of the MLP, as Meta's FeedForward computes it: two thirds of 4 H, times a factor,
    rounded up to a multiple."""
    if given.content.get("hidden_dim") is not None:
        return given.whole("hidden_dim")
    wanted = int(given.number("ffn_dim_multiplier", 1.0) * int(8 * hidden / 3))
    multiple = given.whole("multiple_of", 256)
    return -(-wanted // multiple) * multiple


@dataclass(frozen=True)
class _Params:
    content: dict[str, Any]
    path: Path

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected a positive number")
        return float(value)

    def _value(self, name: str, default: float | None) -> Any:
        value = self.content.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{self.path} has no {name}")
        return default if value is None else value
