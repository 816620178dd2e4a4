"""Llama models in Meta's own format: ``params.json``, and one ``consolidated.*.pth`` for each
model-parallel rank that trained the model.

Meta's params.json leaves some values to the program that reads it. They are chosen as in Meta's
program and in transformers' conversion, and a note reports them.
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
"""Names of tensors that can be computed from params.json, and are ignored."""
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
"""Meta's names for layers, by Hugging Face name."""


class MetaFolder(TableSource):
    """Folder with params.json and either ``consolidated.00.pth`` to ``consolidated.NN.pth`` or one
    ``consolidated.safetensors``. Files are memory-mapped, and a tensor is read when it is needed.
    Raises CheckpointError if a file is missing or damaged, if tensors are missing, superfluous or
    of a different shape, or if params.json has an unsupported value."""

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
        """Check the files against Meta's checklist.chk, if it exists. Each of its lines has an MD5
        sum and a file name."""
        checklist = folder / _CHECKSUMS
        if not checklist.is_file():
            return
        lines = read_bytes(checklist).decode(errors="replace").split("\n")
        sums = [line.split() for line in lines if len(line.split()) == 2]
        for wanted, name in sums[share::shares]:
            path = folder / name
            if Path(name).name != name or not path.is_file():
                continue  # the tokenizer is in another folder
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
        """See :meth:`Source.copy_tokenizer`. The tokenizer is built from tokenizer.model in this
        folder or the one above it."""
        rows = self.model.vocabulary.padded
        written = write_tokenizer(self.tokenizer, target, rows, str(self.folder))
        write_generation(target, self.generation)
        return written

    @property
    def generation(self) -> dict[str, Any]:
        """See :attr:`Source.generation`. Like Meta's programs, end Llama 3's texts at the end of a
        turn too, although no file mentions it."""
        if self.tokenizer is None or self.tokenizer.tokenizer_type != "Llama3Tokenizer":
            return {}
        tokenizer = build_tokenizer(self.tokenizer)
        ends = [tokenizer.eos, *tokenizer.tokenize("<|eot_id|>")]
        return with_ends({}, (end for end in ends if end < self.model.vocabulary.size))

    def _vocabulary(self) -> int:
        """Return the number of rows in the head, which is sharded in every version."""
        name = "output.weight"
        if any(name not in rank or rank[name].dim() != 2 for rank in self._ranks):
            raise CheckpointError(f"{self._files[0]} has no {name}")
        return sum(rank[name].shape[0] for rank in self._ranks)

    def _is_tied(self) -> bool:
        """Return whether the head equals the token embedding."""
        pairs = [(rank.get("tok_embeddings.weight"), rank["output.weight"]) for rank in self._ranks]
        return all(
            table is not None
            and table.shape == head.shape
            # one row usually differs, so that the others need not be read
            and torch.equal(table[:1], head[:1])
            and torch.equal(table, head)
            for table, head in pairs
        )

    def _check_names(self) -> None:
        """Raise CheckpointError if tensors are missing or superfluous."""
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
        """Return the function that joins the ranks' shards of a tensor, chosen by their shapes:
        concatenate rows or columns, use one of the copies on all ranks, or, with fewer key heads
        than ranks, skip copies on neighbouring ranks. Raises CheckpointError if the shapes do not
        fit."""
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
        """Return a tensor in Hugging Face's layout, by its Hugging Face name."""
        values = self._joining(theirs)([rank[self._theirs[theirs]] for rank in self._ranks])
        heads = self._rotated_heads(theirs)
        if not heads:
            return values
        # Meta's RoPE rotates channels 2i and 2i + 1 of a head, Hugging Face's i and i + D/2.
        rows, width = values.shape
        pairs = values.view(heads, rows // heads // 2, 2, width)
        return pairs.transpose(1, 2).reshape(rows, width)

    def _rotated_heads(self, theirs: str) -> int:
        """Return the number of heads in a tensor whose rows are in Meta's RoPE order. Return 0 for
        other tensors."""
        attention = self.model.attention
        if theirs.endswith("self_attn.q_proj.weight"):
            return attention.num_attention_heads
        return attention.num_query_groups if theirs.endswith("self_attn.k_proj.weight") else 0


def _name_of(theirs: str) -> str:
    """Convert a tensor's Hugging Face name to Meta's."""
    layer = re.match(r"model\.(layers\.\d+\.)(.*)", theirs)
    prefix, inner = layer.groups() if layer else ("", theirs)
    return f"{prefix}{_NAMES[inner.removesuffix('.weight')]}.weight"


def _has_weights(folder: Path) -> bool:
    return (folder / _WHOLE).is_file() or any(
        _RANK.fullmatch(each.name) for each in folder.iterdir()
    )


def _files_of(folder: Path) -> list[Path]:
    """Return the weight files in rank order. Raises CheckpointError if a rank's file is missing."""
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
    """Return a file's memory-mapped tensors by name."""
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
    """Return the configuration for a ``tokenizer.model``, which has SentencePiece's format up to
    Llama 2, and byte-pair ranks since Llama 3. ``path`` may also be a folder with Hugging Face's
    files."""
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
"""Keys that are not read: sizes of Meta's buffers, and a flag that is otherwise checked to be
false."""


@dataclass(frozen=True)
class MetaParams:
    """Content of a params.json.

    Attributes:
        keys: equivalent keys of config.json, except those that the tensors determine: vocabulary
            size and tied head.
        scaled: True if the rotary frequencies are scaled as in Llama 3.1.
        notes: values that the file lacks and that were assumed.
    """

    keys: dict[str, Any]
    scaled: bool
    notes: tuple[str, ...]

    def config(self, vocabulary: int, tied: bool) -> dict[str, Any]:
        """Return the config.json for a model with ``vocabulary`` tokens and a ``tied`` or separate
        head."""
        keys = {**self.keys, "vocab_size": vocabulary, "tie_word_embeddings": tied}
        if self.scaled:
            # Only Llama 3.2's small models have a tied head, and their scaling factor differs.
            keys["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": 32.0 if tied else 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        return keys


def read_params(content: Any, path: Path) -> MetaParams:
    """Interpret ``content``, the parsed params.json at ``path``. Raises CheckpointError if a value
    is missing or malformed, or if the model is not supported."""
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
    # Only Mistral's files specify the MLP width itself.
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
    """Return the maximum sequence length of the published model with these properties. Scaled
    rotary frequencies identify Llama 3.1 and later; otherwise the RoPE base distinguishes Llama 2,
    Llama 3, Code Llama and others."""
    if mistral:
        return 32_768
    return 131_072 if scaled else {10_000.0: 4096, 500_000.0: 8192}.get(theta, 16_384)


def _ffn_size(given: _Params, hidden: int) -> int:
    """Return the MLP width as Meta's FeedForward computes it: two thirds of 4 H, times a factor,
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
