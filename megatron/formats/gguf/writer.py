"""Writer of GGUF files for llama.cpp, with one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.config.features import AHEAD
from megatron.formats.gguf.architectures import Kind
from megatron.formats.gguf.container import Content, Keys
from megatron.formats.gguf.kinds import form_of, kind_of
from megatron.formats.gguf.source import HEAD, TABLE, GGUFModel
from megatron.formats.gguf.tokenizer import tokenizer_metadata
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.entries import Parameter
from megatron.formats.tensors import finite
from megatron.util.progress import progress_bar

TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
"""``general.file_type`` for each value of --type."""
_EXACT = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight",
)  # fmt: skip
"""Name suffixes of matrices that llama.cpp requires in float32, as it does all vectors."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNIMPORTANT = {
    "attention_dropout", "hidden_dropout", "init_method_std", "hf_architecture", "seq_length",
}  # fmt: skip
"""Model fields that affect only training, and need not be expressed."""


@dataclass(frozen=True)
class _Plan:
    """A model to be written: its metadata, and the tensors that are derived from its
    configuration."""

    model: ModelConfig
    form: Architecture
    kind: Kind
    metadata: Content
    extra: dict[str, Tensor]


def write_gguf(
    source: Source, path: Path, type_name: str, progress: Callable[[str], None] = lambda line: None
) -> None:
    """Write a new GGUF file with weights of the type ``type_name``, a key of :data:`TYPES`, and
    with the tokenizer if GGUF can express it. Then read it back and compare.

    Multi-token prediction blocks are left out, as llama.cpp's converter does for most models.
    Raises ValueError if llama.cpp does not support the network. Raises CheckpointError if the
    checkpoint is damaged, a weight is not finite in the type, or a value that is read back differs.
    Raises OSError if the file cannot be written."""
    import gguf

    if ahead := source.model.blocks_ahead:
        progress(f"left out: {ahead} further token(s) that multi-token prediction (mtp.*) adds")
    plan = _plan(source.model)
    writer = gguf.GGUFWriter(path, plan.kind.name)
    writer.add_file_type(gguf.LlamaFileType[TYPES[type_name]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(source.folder.stem)
    tokens = tokenizer_metadata(source, plan.kind.name, progress)
    for key, value in {**plan.metadata, **tokens}.items():
        _add(writer, key, value)
    stored = list(_tensors(source, plan, type_name))
    for name, shape, kind, _ in stored:
        size = gguf.quants.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(size)), kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, _, kind, make in progress_bar(f"writing {path.name}", stored, unit=" tensors"):
            writer.write_tensor_data(_bytes_of(make(), kind).reshape(-1))
    finally:
        writer.close()
    _check(source, GGUFModel(path), type_name)
    count = f"{len(stored)} tensors, {path.stat().st_size / 1e6:,.1f} MB"
    progress(f"{plan.kind.name} ({plan.form.title}), {type_name}: {count}; read back and equal")


def _plan(model: ModelConfig) -> _Plan:
    """Plan how to write a model. Raises ValueError if metadata cannot describe it completely."""
    # Drop the multi-token prediction blocks, which only training needs.
    parts: list[Any] = [type(part)() if part.blocks_ahead else part for part in model.parts]
    model = replace(model, parts=tuple(parts))
    form = form_of(model)
    kind = kind_of(form.model_type)
    content = form.config(model)
    metadata, extra = kind.metadata(content), dict(kind.extra(content))
    names = [place.name for each in form.parameters(model) for theirs in each.theirs
             for place in kind.places(theirs, model.num_layers)]  # fmt: skip
    given = Keys(metadata, kind.name, {*names, *extra}, extra.__getitem__, kind.name)
    try:
        read = kind.config(given)
    except CheckpointError as error:
        raise ValueError(f"GGUF files have no form for such a model: {error}") from None
    read |= {
        "vocab_size": content["vocab_size"], "tie_word_embeddings": content["tie_word_embeddings"],
    }  # fmt: skip
    near = architecture_named(read, Path(kind.name)).model(read, Path(kind.name)).flags()
    flags = model.flags()
    lost = [
        f"{each.name} = {getattr(flags, each.name)!r} (llama.cpp has {getattr(near, each.name)!r})"
        for each in fields(flags)
        if each.name not in _UNIMPORTANT and each.metadata["role"]
        and getattr(flags, each.name) != getattr(near, each.name)
    ]  # fmt: skip
    if lost:
        raise ValueError(f"GGUF files of {kind.name} cannot say {', '.join(lost)}")
    metadata |= {f"{kind.name}.vocab_size": content["vocab_size"]}
    return _Plan(model, form, kind, metadata, extra)


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key with the value type that llama.cpp reads: uint32 for sizes and ids."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


_Stored = tuple[str, tuple[int, ...], Any, Callable[[], Tensor]]


def _tensors(source: Source, plan: _Plan, type_name: str) -> Iterator[_Stored]:
    """Yield the name, shape and type of each tensor, with a function that returns its values."""
    from gguf import GGMLQuantizationType as Kinds

    model = plan.model
    for name, values in plan.extra.items():
        yield name, tuple(values.shape), Kinds.F32, partial(torch.clone, values)
    for parameter in plan.form.parameters(model):
        like = parameter.to_hf(torch.empty(source.shape(parameter.ours), device="meta"))
        for name, values in _joined(plan, parameter, like, model).items():
            shape = tuple(values.shape)
            kind = _type_of(name, shape, type_name)
            make = partial(_made, source, plan, parameter, name, kind)
            yield name, shape, kind, make
            if name == TABLE and plan.kind.repeats_head and model.embedding.tied:
                yield HEAD, shape, kind, make


def _made(source: Source, plan: _Plan, parameter: Parameter, name: str, kind: Any) -> Tensor:
    """Return the values of a tensor in the file, in float32. Raises NotFiniteError if they overflow
    in its type."""
    theirs = parameter.to_hf(source.tensor(parameter.ours))
    values = _joined(plan, parameter, theirs, source.model)[name].contiguous()
    # Q8_0 has float16 scales: a block's largest magnitude divided by 127.
    finite(parameter.ours, values / 127 if kind.name == "Q8_0" else values,
           _DTYPES.get(kind.name, torch.float16), source.folder)  # fmt: skip
    return values


def _joined(
    plan: _Plan, parameter: Parameter, theirs: dict[str, Tensor], model: ModelConfig
) -> dict[str, Tensor]:
    """Return the tensors in the file that store one parameter, by name. All experts are stacked in
    one tensor."""
    joined: dict[str, list[Tensor]] = {}
    for each, values in theirs.items():
        for place, part in plan.kind.to_file(each, values, model).items():
            part = part if place.expert is None else part.unsqueeze(0)
            joined.setdefault(place.name, []).append(part)
    return {name: torch.cat(parts) for name, parts in joined.items()}


def _type_of(name: str, shape: tuple[int, ...], type_name: str) -> Any:
    """Return the type of a tensor, chosen as llama.cpp's converter does: float32 for vectors and
    for matrices that llama.cpp requires in it, and float16 if rows are not a multiple of Q8_0's
    blocks."""
    from gguf import GGML_QUANT_SIZES
    from gguf import GGMLQuantizationType as Kinds

    if len(shape) < 2 or name.endswith(_EXACT):
        return Kinds.F32
    kind = Kinds[type_name.upper()]
    return Kinds.F16 if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def _bytes_of(values: Tensor, kind: Any) -> Any:
    """Return the bytes that store a tensor in type ``kind``."""
    from gguf.quants import quantize

    if kind.name in _DTYPES:
        return values.to(_DTYPES[kind.name]).contiguous().view(torch.uint8).numpy()
    return quantize(values.float().contiguous().numpy(), kind)


_ROUNDING = {"f32": 1e-6, "f16": 2.0**-10, "bf16": 2.0**-7, "q8_0": 2.0**-7}
"""Maximum rounding error of each type, relative to the largest weight of a parameter."""


def _check(source: Source, written: GGUFModel, type_name: str) -> None:
    """Raise CheckpointError if a file differs from its source by more than the type's rounding."""
    names = [name for name in source.names() if not name.startswith(AHEAD)]
    for name in progress_bar("reading it back", names, unit=" parameters"):
        values, near = source.tensor(name), written.tensor(name)
        allowed = _ROUNDING[type_name] * values.abs().max() + 1e-6
        if values.shape != near.shape or not bool(((values - near).abs() <= allowed).all()):
            raise CheckpointError(f"{written.folder}: {name} differs from {source.folder}")
