"""Writer of weights in Megatron's old layout (checkpoint version 3), without optimizer state. A
network with experts gets the names of Megatron's core library, which reads this layout with
``--ckpt-format torch``. Other networks get the names from before the core library."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER, replace_folder
from megatron.checkpoint.source import TOKENIZER, Source
from megatron.config import ModelConfig, TokenizerConfig
from megatron.formats.conversion.output import unfinished_folder
from megatron.formats.features import whole_shards
from megatron.formats.legacy_megatron.arguments import arguments_of_model, divided_sizes
from megatron.formats.legacy_megatron.experts import cut_expert, is_of_experts, one_expert
from megatron.formats.legacy_megatron.names import (
    EMBEDDING,
    HEAD_COPY,
    kv_to_megatron,
    names_of_family,
    qkv_to_megatron,
    stack_name,
    stack_of,
    to_core,
    to_megatron,
)
from megatron.formats.legacy_megatron.rank_files import (
    MODEL_FILES,
    Rank,
    iteration_folder,
    rank_folder,
)
from megatron.formats.tensors import DTYPES
from megatron.util.files import sync, sync_path
from megatron.util.progress import progress_bar

VERSION = 3.0
"""Value of ``checkpoint_version`` to write."""


def write_megatron(
    source: Source,
    save: Path,
    tensor_size: int = 1,
    pipeline_size: int = 1,
    iteration: int | None = None,
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda line: None,
    check: Callable[[Path], None] | None = None,
    expert_size: int = 1,
) -> Path:
    """Write the weights as Megatron-LM's ranks would, to a folder for Megatron's ``--load``, and
    return the checkpoint's folder. One rank's file is in memory at a time. Without ``iteration``,
    write ``release``, which Megatron treats as initial weights. ``check`` is called with the folder
    before it is published, and can cancel the export by raising an error. An error leaves nothing
    behind.

    Raises ValueError if Megatron has no such network or the sizes do not divide it, CheckpointError
    if the source is damaged or the checkpoint exists, and OSError if a file cannot be written."""
    model = source.model.with_vocabulary(source.model.vocabulary.size, max(tensor_size, 1))
    arguments = arguments_of_model(model)
    check_sizes(model, tensor_size, pipeline_size)
    check_experts(model, expert_size)
    surplus = sorted(set(source.names()) - whole_shards(model).keys())
    if surplus:
        raise ValueError(f"{source.folder} has {surplus[0]}, which this export does not write")
    folder = save / iteration_folder(iteration)
    arguments |= {
        "tensor_model_parallel_size": tensor_size,
        "pipeline_model_parallel_size": pipeline_size,
        "expert_model_parallel_size": expert_size,
        "pipeline_model_parallel_split_rank": stages_of(model, pipeline_size).split,
        "virtual_pipeline_model_parallel_size": None,
        "consumed_valid_samples": 0,
    }
    with new_folder(source, model, folder, arguments, iteration, dtype) as partial:
        sizes = Rank(pipeline_size, tensor_size, expert_size)
        ranks = list(itertools.starmap(Rank, itertools.product(*map(range, sizes))))
        for rank in progress_bar("writing", ranks, unit=" ranks"):
            content = {
                "args": argparse.Namespace(**arguments),
                "checkpoint_version": VERSION,
                "iteration": iteration or 0,
                "model": nested(_rank(source, model, rank, sizes, DTYPES[dtype])),
            }
            name = f"{rank_folder(rank, sizes)}/{MODEL_FILES[0]}"
            _save(content, partial / name)
            progress(f"{name}: {(partial / name).stat().st_size / 1e6:,.1f} MB")
        if check is not None:
            check(partial)
    return folder


@contextmanager
def new_folder(
    source: Source,
    model: ModelConfig,
    folder: Path,
    arguments: dict[str, Any],
    iteration: int | None,
    dtype: str,
    trackers: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``folder`` if the block ends without an error.
    Completes ``arguments`` in place and copies the tokenizer. ``trackers`` are files to write next
    to the folder, by default Megatron's tracker. Raises CheckpointError if ``folder`` exists."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; remove it, or give another folder")
    with unfinished_folder(folder) as partial:
        arguments |= copied_tokenizer(source, folder, partial) | {
            "padded_vocab_size": model.vocabulary.padded,
            "params_dtype": DTYPES[dtype],
            "fp16": dtype == "float16",
            "bf16": dtype == "bfloat16",
            "iteration": iteration or 0,
            "consumed_train_samples": source.state.get("consumed_samples", 0),
        }
        yield partial
        named = "release" if iteration is None else str(iteration)
        replace_folder(partial, folder, trackers or {MEGATRON_TRACKER: named})


def check_sizes(model: ModelConfig, tensor_size: int, pipeline_size: int) -> None:
    """Raise ValueError if Megatron does not support these sizes of the parallel layout."""
    for name, value in divided_sizes(model).items():
        if tensor_size < 1 or value % tensor_size:
            why = ": Megatron does not copy key and value heads to several ranks"
            raise ValueError(
                f"--target-tensor-parallel-size {tensor_size} must divide {name} {value}"
                f"{why if name == 'num_query_groups' else ''}"
            )
    stages_of(model, pipeline_size)


def _rank(
    source: Source, model: ModelConfig, rank: Rank, sizes: Rank, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a rank's weights, by Megatron's names."""
    shards, family = whole_shards(model), names_of_family(model.family)
    stages, core = stages_of(model, sizes.pipeline), has_experts(model)

    def named(name: str, first_block: int = 0) -> str:
        if core:
            next_to_experts = f"{name.split('.mlp')[0]}.mlp.router.weight" in shards
            theirs = to_core(name, first_block, next_to_experts)
        else:
            theirs = to_megatron(name, first_block, family)
        assert theirs is not None, name
        return theirs

    def share(name: str) -> Tensor:
        return share_of(source.tensor(name), name, model, rank.tensor, sizes.tensor, dtype)

    def experts(name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values) of this rank's experts, numbered from 0."""
        values = source.tensor(name).chunk(sizes.expert)[rank.expert]
        for number, each in enumerate(values):
            mine = cut_expert(each, name, model.mlp.gated, rank.tensor, sizes.tensor)
            yield one_expert(name, number), mine.to(dtype, copy=True)

    tensors: dict[str, Tensor] = {}
    for name in shards:
        theirs = named(one_expert(name, 0))
        if rank.pipeline in stages.of(theirs):
            first = stages.first_block(theirs, rank.pipeline)
            parts = experts(name) if is_of_experts(name) else [(name, share(name))]
            tensors |= {named(part, first): values for part, values in parts}
    if model.head == "lm" and model.embedding.tied and 0 < rank.pipeline == sizes.pipeline - 1:
        copy = "output_layer.weight" if core else HEAD_COPY
        tensors[copy] = share("embedding.word_embeddings.weight")
    return tensors


def share_of(
    values: Tensor, name: str, model: ModelConfig, rank: int, size: int, dtype: torch.dtype
) -> Tensor:
    """Return a tensor-parallel rank's shard of a parameter, with rows in Megatron's order."""
    share = whole_shards(model)[name].cut(values, {"tensor": (rank, size)})
    return _megatron_order(name, share, model, size).to(dtype, copy=True)


def has_experts(model: ModelConfig) -> bool:
    """Return whether any layer has experts."""
    return any(map(is_of_experts, whole_shards(model)))


def check_experts(model: ModelConfig, size: int) -> None:
    """Raise ValueError if a network's experts cannot be distributed over ``size`` expert ranks, or
    if the core library has no such layer."""
    shards = whole_shards(model)
    experts = {s.full_shape[0] for name, s in shards.items() if is_of_experts(name)}
    if size < 1 or any(number % size for number in experts or {1}):
        raise ValueError(
            f"--target-expert-parallel-size {size} must divide the numbers of experts, "
            f"{', '.join(map(str, sorted(experts))) or 'and the network has none'}"
        )
    if experts:
        lost = [name for name in shards if to_core(one_expert(name, 0)) is None]
        if lost:
            raise ValueError(f"Megatron's core library has no {lost[0]} in a layer of experts")


def _megatron_order(name: str, share: Tensor, model: ModelConfig, size: int) -> Tensor:
    attention = model.attention
    heads, groups = attention.num_attention_heads // size, attention.num_query_groups // size
    if ".attention.qkv." in name:
        return qkv_to_megatron(share, VERSION, heads, groups, attention.kv_channels)
    if ".cross_attention.kv." in name:
        return kv_to_megatron(share, VERSION, groups, attention.kv_channels)
    return share


def nested(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return Megatron's nested dictionaries. Embeddings have all levels. Other weights have two
    levels, and keys that contain dots (``language_model`` > ``encoder`` >
    ``layers.0.mlp.dense_h_to_4h.weight``)."""
    if not any(name.startswith("language_model.") for name in weights):
        return dict(weights)  # The core library's dictionaries are flat.
    levels_of: dict[str, Any] = {}
    for name, values in weights.items():
        if name.startswith("language_model.embedding."):
            levels = name.split(".")
        elif name.startswith("language_model."):
            levels = name.split(".", 2)
        else:
            levels = name.split(".", 1)
        place = levels_of
        for level in levels[:-1]:
            place = place.setdefault(level, {})
        place[levels[-1]] = values
    return levels_of


def copied_tokenizer(source: Source, folder: Path, partial: Path) -> dict[str, Any]:
    """Copy the tokenizer's files, if there are any, and return the arguments for the tokenizer."""
    config = source.tokenizer or TokenizerConfig()
    names = "tokenizer_type vocab_file merge_file tokenizer_model vocab_size vocab_extra_ids"
    named = {name: getattr(config, name) for name in names.split()}
    if config.tokenizer_type == "IdTokenizer":
        return named | {"tokenizer_type": None}  # None stands for an unknown tokenizer.
    if config.tokenizer_type not in (None, "HFTokenizer", "HuggingFaceTokenizer"):
        return named
    copied = source.copy_tokenizer(partial / TOKENIZER)
    place = str((folder / TOKENIZER).resolve()) if copied else config.tokenizer_model
    if not place:
        return named
    theirs = {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": place}
    return named | theirs | {"tokenizer_model": place}


def _save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir()
    with open(path, "wb") as file:
        torch.save(content, file)
        sync(file)
    sync_path(path.parent)


class _Span(NamedTuple):
    """The pipeline ranks that a stack is distributed over, and the number of blocks on each."""

    ranks: range
    blocks: int


class Stages(NamedTuple):
    """Distribution of parameters over pipeline ranks. The blocks of a stack are divided evenly.
    With an encoder and a decoder, the ranks from ``split`` on have the decoder, and the first of
    these has a copy of the embeddings. ``split`` is None for a single stack or rank."""

    size: int
    spans: Mapping[str, _Span]
    split: int | None

    def of(self, theirs: str) -> tuple[int, ...]:
        """Return the pipeline ranks that have a parameter. ``theirs`` is Megatron's name, with
        block indices counted within the whole stack."""
        if theirs.startswith(EMBEDDING):
            return (0,) if self.split is None else (0, self.split)
        stack = stack_name(theirs)
        if stack is None:
            return (self.size - 1,)
        ranks, blocks = self.spans[stack]
        numbered = stack_of(theirs)
        return (ranks[-1] if numbered is None else ranks[numbered[1] // blocks],)

    def first_block(self, theirs: str, rank: int) -> int:
        """Return the index, within its stack, of the block that a rank calls ``layers.0``."""
        stack = stack_name(theirs)
        if stack is None:
            return 0
        return (rank - self.spans[stack].ranks[0]) * self.spans[stack].blocks


def stages_of(model: ModelConfig, size: int) -> Stages:
    """Distribute a network over ``size`` pipeline ranks. With two stacks, choose the split with the
    fewest blocks per rank. Raises ValueError if none is possible."""
    stacks = names_of_family(model.family).stacks
    lengths = {name: stack.length(model) for name, stack in stacks.items()}
    flag = f"--target-pipeline-parallel-size {size}"
    if len(stacks) == 1 or size == 1:
        if size < 1 or any(length % size for length in lengths.values()):
            (length,) = lengths.values()
            raise ValueError(f"{flag} must divide the {length} layers")
        spans = {name: _Span(range(size), length // size) for name, length in lengths.items()}
        return Stages(size, spans, None)
    (first, before), (second, after) = lengths.items()
    splits = [
        split for split in range(1, size) if before % split == 0 and after % (size - split) == 0
    ]
    if not splits:
        raise ValueError(
            f"{flag}: the ranks cannot be divided into some that divide the {before} layers of the "
            f"{first} and others that divide the {after} of the {second}"
        )
    split = min(splits, key=lambda split: max(before // split, after // (size - split)))
    spans = {
        first: _Span(range(split), before // split),
        second: _Span(range(split, size), after // (size - split)),
    }
    return Stages(size, spans, split)
