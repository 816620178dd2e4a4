"""A Llama as Meta publishes it: ``params.json``, and a ``consolidated.*.pth`` of each of the
model-parallel ranks that it was trained on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_bytes, read_json
from megatron.checkpoint.generation_settings import with_ends, write_generation
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig, TokenizerConfig
from megatron.formats.huggingface.architecture import Parameter
from megatron.formats.huggingface.registry import architecture_named
from megatron.formats.legacy_megatron.vocabulary import write_tokenizer
from megatron.formats.meta.params import read_params
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


class _Theirs(NamedTuple):
    """A tensor of Hugging Face's form: Meta's name, its whole shape, and how many heads have rows
    that Meta rotates in neighbouring pairs (0 for none)."""

    name: str
    shape: tuple[int, ...]
    heads: int


class MetaFolder(Source):
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
        self._theirs = self._described(self._parameters)
        self._check()
        self.tokenizer = _tokenizer_beside(folder)

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
                found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
            if found.hexdigest() != wanted.lower():
                raise CheckpointError(
                    f"{path} is damaged: its MD5 sum is {found.hexdigest()}, {checklist.name} says "
                    f"{wanted}; download it again"
                )

    def names(self) -> Sequence[str]:
        return list(self._parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        parameter = self._parameter(name)
        parts = [
            torch.empty(self._theirs[theirs].shape, device="meta") for theirs in parameter.theirs
        ]
        return tuple(parameter.from_hf(parts).shape)

    def kinds(self, name: str) -> Sequence[str]:
        """Weights alone."""
        self._parameter(name)
        return ["weight"]

    def dtype(self, name: str, kind: str = "weight") -> str:
        theirs = self._theirs[self._parameter(name).theirs[0]]
        return str(self._ranks[0][theirs.name].dtype).removeprefix("torch.")

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        parameter = self._parameter(name)
        if kind != "weight":
            raise CheckpointError(f"{self.folder} has no {kind} of {name}, only weights")
        return parameter.from_hf([self._whole(theirs).float() for theirs in parameter.theirs])

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

    def _parameter(self, name: str) -> Parameter:
        if name not in self._parameters:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return self._parameters[name]

    def _vocabulary(self) -> int:
        """Rows of the head, which the ranks divide in every version."""
        name = "output.weight"
        if any(name not in rank or rank[name].dim() != 2 for rank in self._ranks):
            raise CheckpointError(f"{self._files[0]} has no {name}")
        return sum(rank[name].shape[0] for rank in self._ranks)

    def _is_tied(self) -> bool:
        """Whether the head repeats the token embedding."""
        pairs = [(rank.get("tok_embeddings.weight"), rank["output.weight"]) for rank in self._ranks]
        return all(
            table is not None
            and table.shape == head.shape
            and torch.equal(table[:1], head[:1])  # the rest is seldom read
            and torch.equal(table, head)
            for table, head in pairs
        )

    def _described(self, parameters: Mapping[str, Parameter]) -> dict[str, _Theirs]:
        """Meta's tensor for each of Hugging Face's."""
        attention, found = self.model.attention, {}
        rotated = {
            "self_attn.q_proj.weight": attention.num_attention_heads,
            "self_attn.k_proj.weight": attention.num_query_groups,
        }
        shapes = self._shapes()
        for parameter in parameters.values():
            for theirs in parameter.theirs:
                layer = re.match(r"model\.layers\.(\d+)\.(.*)", theirs)
                inner = layer[2] if layer else theirs
                stem = inner.removesuffix(".weight")
                prefix = f"layers.{layer[1]}." if layer else ""
                found[theirs] = _Theirs(
                    f"{prefix}{_NAMES[stem]}.weight", shapes[stem], rotated.get(inner, 0)
                )
        return found

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes by Hugging Face's name of a layer."""
        model, attention = self.model, self.model.attention
        hidden, ffn = model.hidden_size, model.mlp.ffn_hidden_size
        queries = attention.num_attention_heads * attention.kv_channels
        keys = attention.num_query_groups * attention.kv_channels
        table = (model.vocabulary.size, hidden)
        return {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "model.norm": (hidden,),
            "model.embed_tokens": table,
            "lm_head": table,
        }

    def _check(self) -> None:
        """Raises CheckpointError if tensors are missing, superfluous or of another shape."""
        wanted = {each.name for each in self._theirs.values()}
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
        for theirs in self._theirs.values():
            self._joining(theirs)

    def _joining(self, theirs: _Theirs) -> Callable[[Sequence[Tensor]], Tensor]:
        """How the ranks' shares of a tensor make a whole one, by their shapes: rows or columns one
        after the other, or the same on every rank, or, with fewer key heads than ranks, on some
        neighbouring ranks."""
        shares, wanted = [rank[theirs.name] for rank in self._ranks], theirs.shape
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
        found = " and ".join(dict.fromkeys(map(str, shapes)))
        raise CheckpointError(
            f"{self.folder}: {theirs.name} has the shape {found} in {count} file"
            f"{'s' if count > 1 else ''}; {PARAMS} makes it {wanted}"
        )

    def _whole(self, name: str) -> Tensor:
        """A tensor in Hugging Face's form, in the dtype of the files."""
        theirs = self._theirs[name]
        values = self._joining(theirs)([rank[theirs.name] for rank in self._ranks])
        if not theirs.heads:
            return values
        # Meta rotates channels 2i and 2i + 1 of a head together, Hugging Face i and i + D/2.
        rows, width = values.shape
        pairs = values.view(theirs.heads, rows // theirs.heads // 2, 2, width)
        return pairs.transpose(1, 2).reshape(rows, width)


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
    """The tokenizer of a ``tokenizer.model``: SentencePiece's until Llama 2, ranks of byte pairs
    since Llama 3, which are lines of text; or of a folder of Hugging Face's files."""
    if path.is_dir():
        return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(path))
    with path.open("rb") as file:
        ranks = re.match(rb"[A-Za-z0-9+/=]+ \d+\n", file.read(256)) is not None
    kind = "Llama3Tokenizer" if ranks else "Llama2Tokenizer"
    return TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path))


def _tokenizer_beside(folder: Path) -> TokenizerConfig | None:
    """The tokenizer in the folder or the one above it, if there is one."""
    places = (folder / _TOKENIZER, folder.parent / _TOKENIZER)
    return next((tokenizer_of_file(path) for path in places if path.is_file()), None)
