"""Entries of an architecture's table: the names of its tensors, and how they store our parameters.

Shapes: N query heads, K key and value heads, D head width, F inner width of the MLP, H hidden size.
Rows of our query-key-value weight are all queries, all keys, all values: [(N + 2K) D, H].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig

Condition = Callable[[ModelConfig], bool]
OfBlock = Callable[[ModelConfig, int], int]
"""Function that returns an integer for a block of a model, given the block's index."""


Modules = tuple[str, tuple[int, ...], int, "Reordering"]


@dataclass(frozen=True)
class Reordering:
    """A layout that stores one parameter as one or more tensors. ``from_hf`` is the exact inverse
    of ``to_hf``.

    Attributes:
        of_rows: True if the layout only reorders the rows of a single matrix.
        modules: for a fused weight that is stored in several tensors, each tensor's name, indices
            of the matrices, number of rows, and layout.
    """

    name: str
    tensors: int
    to_hf: Callable[[Tensor, ModelConfig], Sequence[Tensor]]
    from_hf: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    of_rows: bool = False
    modules: Callable[[ModelConfig], Sequence[Modules]] | None = None


def _heads(model: ModelConfig) -> tuple[int, int, int]:
    attention = model.attention
    return attention.num_attention_heads, attention.num_query_groups, attention.kv_channels


def _qkv_rows(model: ModelConfig) -> list[int]:
    _, groups, width = _heads(model)
    return [model.attention.query_rows, groups * width, groups * width]


def _to_grouped(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    _, groups, width = _heads(model)
    parts = [
        part.reshape(groups, -1, width, *values.shape[1:])
        for part in values.split(_qkv_rows(model))
    ]
    return (torch.cat(parts, dim=1).reshape(values.shape),)


def _from_grouped(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    queries, groups, width = _heads(model)
    (values,) = tensors
    shares = values.reshape(groups, queries // groups + 2, width, *values.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in shares.split([queries // groups, 1, 1], 1)])


def _from_rows(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return torch.cat(list(tensors))


def _neighbours(rows: Tensor, model: ModelConfig) -> Tensor:
    """Reorder the rows of heads so that channels that RoPE pairs are adjacent."""
    shape = (-1, 2, model.attention.kv_channels // 2)
    return rows.unflatten(0, shape).transpose(1, 2).flatten(0, 2)


def _halves(rows: Tensor, model: ModelConfig) -> Tensor:
    shape = (-1, model.attention.kv_channels // 2, 2)
    return rows.unflatten(0, shape).transpose(1, 2).flatten(0, 2)


def _to_interleaved(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    q, k, v = values.split(_qkv_rows(model))
    return _neighbours(q, model), _neighbours(k, model), v


def _from_interleaved(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    q, k, v = tensors
    return torch.cat([_halves(q, model), _halves(k, model), v])


SAME = Reordering("as it is", 1, lambda values, _: (values,), lambda tensors, _: tensors[0])
"""One tensor with our layout."""
TRANSPOSED = Reordering(
    "transposed", 1, lambda values, _: (values.mT,), lambda parts, _: parts[0].mT
)
"""A matrix stored as [inputs, outputs] (GPT-2's Conv1D), or a stack of such matrices."""
SEPARATE_QKV = Reordering(
    "separate q, k, v", 3, lambda values, model: values.split(_qkv_rows(model)), _from_rows
)
"""Separate tensors for queries, keys and values."""
AS_ROW = Reordering(
    "as a row", 1, lambda values, _: (values.unsqueeze(0),), lambda parts, _: parts[0].squeeze(0)
)
"""A vector [N] stored as [1, N]."""
INTERLEAVED = Reordering(
    "interleaved", 1, lambda values, model: (_neighbours(values, model),),
    lambda parts, model: _halves(parts[0], model),
)  # fmt: skip
"""Queries or keys whose RoPE pairs neighbouring channels of a head; ours pairs i and i + D/2."""
INTERLEAVED_QKV = Reordering("separate q, k, v, interleaved", 3, _to_interleaved, _from_interleaved)
"""Separate tensors for queries, keys and values, with queries and keys interleaved."""
TWICE = Reordering(
    "twice", 2, lambda values, _: (values, values.clone()), lambda parts, _: parts[0]
)
"""Two tensors with the same values. Only the first is read."""
SEPARATE_KV = Reordering("separate k, v", 2, lambda values, _: values.chunk(2), _from_rows)
"""Separate tensors for the keys and values of cross-attention."""
GATE_AND_UP = Reordering("separate gate, up", 2, lambda values, _: values.chunk(2), _from_rows)
"""Separate tensors for gate and up projection, which our parameter fuses as [2F, H]."""
GROUPED_QKV = Reordering("q, k, v by group", 1, _to_grouped, _from_grouped)
"""One tensor [K, N/K + 2, D, H]: for each key and value head, the queries that share it, the key
and the value. With N = K this is [N, 3, D, H], the order of Megatron, GPT-NeoX and BLOOM."""


def always(model: ModelConfig) -> bool:
    """Return True. Used as the condition of parameters that every model has."""
    return True


def biased(model: ModelConfig) -> bool:
    """Return whether all linear layers have biases."""
    return model.mlp.bias


def qkv_biased(model: ModelConfig) -> bool:
    """Return whether queries, keys and values have biases."""
    return model.attention.qkv_bias


def attention_biased(model: ModelConfig) -> bool:
    """Return whether all linear layers of attention have biases."""
    return model.attention.proj_bias


def untied(model: ModelConfig) -> bool:
    """Return whether the output layer has its own weight."""
    return not model.embedding.tied


@dataclass(frozen=True)
class Entry:
    """One kind of parameter, and the tensors that store it. ``ours`` is the canonical name, in
    which ``{n}`` is the block's index. ``when`` returns whether a model has the parameter.

    The names in ``theirs`` have ``{n}`` too, or ``{before}`` for the index of the preceding block.
    ``first`` has the names in the first block if they differ. Outside of blocks, ``{last}`` is the
    index of the last block, and ``{decoder_last}`` that of a decoder's last block.

    Attributes:
        at: returns 0 for blocks that lack the parameter; None if all blocks have it.
        slices: number of slices along the first dimension, such as experts, that a block stores in
            separate tensors. ``{e}`` in a name is the index of the slice. None means one.
        others: alternative layouts of the parameter in files.
        exact: whether the parameter is stored in float32 whatever the dtype of the weights.
        parameter: name, in `transformers` 5, of a weight [E, O, I] that stacks several matrices and
            is not in a linear module.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Reordering = SAME
    when: Condition = always
    first: tuple[str, ...] = ()
    at: OfBlock | None = None
    slices: OfBlock | None = None
    others: tuple[Entry, ...] = ()
    exact: bool = False
    parameter: str = ""

    def __post_init__(self) -> None:
        assert len(self.theirs) == self.form.tensors, self.ours

    @property
    def stack(self) -> str | None:
        """Name of the stack of blocks that contains the parameter; None outside of blocks."""
        return self.ours.partition(".{n}.")[0] if "{n}" in self.ours else None

    def within(self, stack: str, prefix: str) -> Entry:
        """Return the entry with the stack and ``{n}`` prepended to our name, and ``prefix`` to
        theirs."""
        return dataclasses.replace(
            self,
            ours=f"{stack}.{{n}}.{self.ours}",
            theirs=tuple(f"{prefix}.{name}" for name in self.theirs),
            others=tuple(other.within(stack, prefix) for other in self.others),
            parameter=self.parameter and f"{prefix}.{self.parameter}",
        )

    def of_block(self, model: ModelConfig, n: int) -> Parameter:
        """Return the parameter of block ``n``."""
        names = self.first if self.first and n == 0 else self.theirs
        slices = None if self.slices is None else self.slices(model, n)
        theirs = tuple(
            name.format(n=n, before=n - 1, e=e) for e in range(slices or 1) for name in names
        )
        others = tuple(other.of_block(model, n) for other in self.others)
        return Parameter(self.ours.format(n=n), theirs, self, model, slices, others)


def weight(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """Return the entry for a weight without bias, such as an embedding or the output layer."""
    return (Entry(f"{ours}.weight", (f"{theirs}.weight",), when=when),)


def norm(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """Return the entries for a norm's weight and bias, which a model may lack."""
    return (
        *weight(ours, theirs, lambda model: when(model) and model.norm.traits.weighted),
        Entry(
            f"{ours}.bias",
            (f"{theirs}.bias",),
            when=lambda model: when(model) and model.norm.traits.biased,
        ),
    )


def linear(
    ours: str, *theirs: str, form: Reordering = SAME, bias: Condition = biased
) -> tuple[Entry, ...]:
    """Return the entries for a linear layer. The bias of a transposed weight is stored
    unchanged."""
    bias_form = SAME if form.name == "transposed" else form
    return (
        Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), form),
        Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), bias_form, bias),
    )


def head_bias(theirs: str) -> tuple[Entry, ...]:
    """Return the entries for the bias of a language model's logits, which a model may lack."""

    def of_head(tied: bool) -> Condition:
        return lambda model: (
            model.embedding.lm_head_bias and untied(model) is not tied and model.head == "lm"
        )

    return (
        Entry(f"{TABLE.removesuffix('weight')}bias", (theirs,), when=of_head(True)),
        Entry("output_layer.bias", (theirs,), when=of_head(False)),
    )


def block(prefix: str, *parts: Sequence[Entry], stack: str = "layers") -> tuple[Entry, ...]:
    """Return a block's entries, with the stack and ``{n}`` prepended to our names and ``prefix`` to
    theirs."""
    return tuple(entry.within(stack, prefix) for part in parts for entry in part)


def decoder_entries(
    table: str,
    blocks: str,
    final_norm: str,
    *parts: Sequence[Entry],
    further: Sequence[Entry] = (),
    head: str = "lm_head",
) -> tuple[Entry, ...]:
    """Return a decoder's entries: token embedding, ``further`` entries, the ``parts`` of each
    block, final norm, and the output layer if it is not tied."""
    return (
        *weight("embedding.word_embeddings", table),
        *further,
        *block(blocks, *parts),
        *norm("final_norm.norm", final_norm),
        *weight("output_layer", head, when=untied),
    )


TABLE = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Parameter:
    """An entry applied to one model, with block indices in its names. With slices, ``theirs`` lists
    the names of all slices in order."""

    ours: str
    theirs: tuple[str, ...]
    entry: Entry
    model: ModelConfig
    slices: int | None = None
    others: tuple[Parameter, ...] = ()

    def to_hf(self, values: Tensor) -> dict[str, Tensor]:
        """Return the tensors that store the whole parameter, by name. It must have no padding."""
        stored = (values,) if self.slices is None else values.unbind()
        parts = (part for each in stored for part in self.entry.form.to_hf(each, self.model))
        return dict(zip(self.theirs, (part.contiguous() for part in parts), strict=True))

    def from_hf(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the whole parameter, given its tensors in order: the inverse of :meth:`to_hf`.
        Only one slice at a time is read into memory."""
        form = self.entry.form
        if self.slices is None:
            return form.from_hf(list(tensors), self.model).contiguous()
        whole: Tensor | None = None
        for e, parts in enumerate(zip(*[iter(tensors)] * form.tensors, strict=True)):
            values = form.from_hf(parts, self.model)
            whole = values.new_empty(self.slices, *values.shape) if whole is None else whole
            whole[e] = values
        assert whole is not None
        return whole
