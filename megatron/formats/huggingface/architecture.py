"""An architecture of `transformers`: its config.json and its tensors, and ours.

Shapes: N query heads, K key and value heads, D head width, F inner width of the MLP, H hidden size.
Rows of our query-key-value weight are all queries, all keys, all values: [(N + 2K) D, H].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.checkpoint.source import resolved
from megatron.config import ModelConfig, ModelFlags
from megatron.formats.features import FEATURES, Requirement, features_of, spelled, without
from megatron.formats.huggingface.config_reader import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    GATES,
    HFConfigReader,
    Keys,
)
from megatron.formats.huggingface.tasks import CAUSAL_LM, REWARD, Task

Condition = Callable[[ModelConfig], bool]
OfBlock = Callable[[ModelConfig, int], int]
"""A number of a block of a model."""


@dataclass(frozen=True)
class Reordering:
    """A way to store one parameter in some tensors; ``from_hf`` is the exact inverse of
    ``to_hf``."""

    name: str
    tensors: int
    to_hf: Callable[[Tensor, ModelConfig], Sequence[Tensor]]
    from_hf: Callable[[Sequence[Tensor], ModelConfig], Tensor]


def _heads(model: ModelConfig) -> tuple[int, int, int]:
    attention = model.attention
    return attention.num_attention_heads, attention.num_query_groups, attention.kv_channels


def _qkv_rows(model: ModelConfig) -> list[int]:
    queries, groups, width = _heads(model)
    return [queries * width, groups * width, groups * width]


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
    """Rows of heads in which the channels that RoPE rotates together follow each other."""
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
"""One tensor, in our order."""
TRANSPOSED = Reordering(
    "transposed", 1, lambda values, _: (values.mT,), lambda parts, _: parts[0].mT
)
"""The matrix as [inputs, outputs] (GPT-2's Conv1D), or each of a stack of matrices."""
SEPARATE_QKV = Reordering(
    "separate q, k, v", 3, lambda values, model: values.split(_qkv_rows(model)), _from_rows
)
"""A tensor each for queries, keys and values."""
INTERLEAVED = Reordering(
    "interleaved", 1, lambda values, model: (_neighbours(values, model),),
    lambda parts, model: _halves(parts[0], model),
)  # fmt: skip
"""Queries or keys of which RoPE rotates neighbouring channels of a head together; here channel i
and channel i + D/2."""
INTERLEAVED_QKV = Reordering("separate q, k, v, interleaved", 3, _to_interleaved, _from_interleaved)
"""A tensor each for queries and keys, which are interleaved, and values."""
TWICE = Reordering(
    "twice", 2, lambda values, _: (values, values.clone()), lambda parts, _: parts[0]
)
"""Two tensors of the same values, of which the first counts."""
SEPARATE_KV = Reordering("separate k, v", 2, lambda values, _: values.chunk(2), _from_rows)
"""A tensor each for the keys and values of attention to another sequence."""
GATE_AND_UP = Reordering("separate gate, up", 2, lambda values, _: values.chunk(2), _from_rows)
"""A tensor each for gate and up projection, which are [2F, H] here."""
GROUPED_QKV = Reordering("q, k, v by group", 1, _to_grouped, _from_grouped)
"""Each key and value head follows the queries that share it: [K, N/K + 2, D, H]. With as many key
heads as query heads that is [N, 3, D, H], the order of Megatron, GPT-NeoX and BLOOM."""


def always(model: ModelConfig) -> bool:
    """The condition of an entry that every model has."""
    return True


def biased(model: ModelConfig) -> bool:
    """True if all linear layers have biases."""
    return model.mlp.bias


def qkv_biased(model: ModelConfig) -> bool:
    """True if queries, keys and values have biases."""
    return model.attention.qkv_bias


def attention_biased(model: ModelConfig) -> bool:
    """True if all of attention's linear layers have biases."""
    return model.attention.proj_bias


def untied(model: ModelConfig) -> bool:
    """True if the head has separate weights."""
    return not model.embedding.tied


@dataclass(frozen=True)
class Entry:
    """One kind of parameter in both forms: ``ours`` is the canonical name, with ``{n}`` for the
    number of the block; ``when`` says whether a model has it.

    Their names have ``{n}`` too, or ``{before}`` for the number of the block before it, where
    ``first`` are the names in the first block; outside of blocks ``{last}`` is the last block's.

    Attributes:
        at: 0 for the blocks of a model that lack it; None if all have it.
        slices: number of slices along the first dimension, as of experts, that a block stores each
            in ``form``, with ``{e}`` for the number of the slice in their names; None for one.
        others: other ways in which files may have the parameter, without one of their own.
        exact: whether it is stored in float32 whatever the dtype of the weights.
        parameter: name in models of `transformers` 5 of a weight [E, O, I] of several matrices,
            which is in no linear module.
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
        """Name of the stack of blocks that it belongs to; None outside of blocks."""
        return self.ours.partition(".{n}.")[0] if "{n}" in self.ours else None

    def within(self, stack: str, prefix: str) -> Entry:
        """The entry of a block of a stack, from one without ``layers.{n}.`` and ``prefix`` in its
        names."""
        return dataclasses.replace(
            self,
            ours=f"{stack}.{{n}}.{self.ours}",
            theirs=tuple(f"{prefix}.{name}" for name in self.theirs),
            others=tuple(other.within(stack, prefix) for other in self.others),
            parameter=self.parameter and f"{prefix}.{self.parameter}",
        )

    def of_block(self, model: ModelConfig, n: int) -> Parameter:
        """The parameter of block ``n``."""
        names = self.first if self.first and n == 0 else self.theirs
        slices = None if self.slices is None else self.slices(model, n)
        theirs = tuple(
            name.format(n=n, before=n - 1, e=e) for e in range(slices or 1) for name in names
        )
        others = tuple(other.of_block(model, n) for other in self.others)
        return Parameter(self.ours.format(n=n), theirs, self, model, slices, others)


def weight(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """An embedding, or the head."""
    return (Entry(f"{ours}.weight", (f"{theirs}.weight",), when=when),)


def norm(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """A norm, with a bias where it has one."""

    def has_bias(model: ModelConfig) -> bool:
        return when(model) and model.norm.traits.biased

    return (
        *weight(ours, theirs, when),
        Entry(f"{ours}.bias", (f"{theirs}.bias",), when=has_bias),
    )


def linear(
    ours: str, *theirs: str, form: Reordering = SAME, bias: Condition = biased
) -> tuple[Entry, ...]:
    """A linear layer; the bias of a transposed weight is stored as it is."""
    bias_form = SAME if form.name == "transposed" else form
    return (
        Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), form),
        Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), bias_form, bias),
    )


def block(prefix: str, *parts: Sequence[Entry], stack: str = "layers") -> tuple[Entry, ...]:
    """The entries of a block of a stack, given without ``layers.{n}.`` and ``prefix`` in their
    names."""
    return tuple(entry.within(stack, prefix) for part in parts for entry in part)


_TABLE = "embedding.word_embeddings.weight"
_REWARD_CLASS = "ForSequenceClassification"
"""End of the class of a reward model: a causal decoder with a head of one label."""
_REWARD_KEYS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _has_rewards(model: ModelConfig) -> bool:
    return model.head == "reward"


def _reward_class(causal: str) -> str:
    """The class of reward models, from that of causal language models."""
    prefix = causal.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return f"{'Gemma3Text' if prefix == 'Gemma3' else prefix}{_REWARD_CLASS}"


def _read_head(given: HFConfigReader) -> dict[str, Any]:
    """The flags of a causal decoder's head. Raises CheckpointError if it has several labels."""
    classes = given.names("architectures") or []
    if not any(name.endswith(_REWARD_CLASS) for name in classes):
        return {}
    labels = len(given.table("id2label")) or given.content.get("num_labels") or 2
    if labels != 1:
        given.refuse(
            "architectures", classes, f"it has {labels} labels; a reward model has one (num_labels)"
        )
    return {"head": "reward"}


@dataclass(frozen=True)
class Parameter:
    """An entry for one parameter of one model; names have the block's number, and those of all
    slices follow each other."""

    ours: str
    theirs: tuple[str, ...]
    entry: Entry
    model: ModelConfig
    slices: int | None = None
    others: tuple[Parameter, ...] = ()

    def to_hf(self, values: Tensor) -> dict[str, Tensor]:
        """Their tensors, from the whole parameter without padding."""
        stored = (values,) if self.slices is None else values.unbind()
        parts = (part for each in stored for part in self.entry.form.to_hf(each, self.model))
        return dict(zip(self.theirs, (part.contiguous() for part in parts), strict=True))

    def from_hf(self, tensors: Iterable[Tensor]) -> Tensor:
        """The inverse of :meth:`to_hf`: the whole parameter, from their tensors in order, of which
        one slice after another is in memory."""
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


class Tensors(Protocol):
    """The tensors in the files of a folder."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor:
        """A tensor, in the dtype of the file."""
        ...


@dataclass(frozen=True)
class Architecture:
    """An architecture of `transformers` and how our models map to it.

    Attributes:
        model_class: its class in `transformers`, or that of a model.
        entries: the table of its tensors.
        keys: keys of config.json that mean the same as a field of :class:`ModelFlags`.
        fixed: fields that have this value in every such model.
        read: the other fields, from config.json and the fields of ``keys``; every key that it reads
            is treated as understood.
        write: the other keys of config.json, which may replace some of ``keys``.
        features: members of :data:`FEATURES` that its models may have besides those of ``keys``.
        gated: whether the MLP has a gate; None where both are possible.
        activations: our flags by the name of an activation; by default follows from ``gated``.
        activation_names: the name that is written for each activation.
        requirements: further conditions on a configuration.
        only_read: further keys and fields, which are read and not written.
        defaults: defaults of keys that the configuration class of `transformers` does not have.
        base_prefix: start of the names of all tensors but the head, which files of a model without
            a head lack.
        endings: other endings of names in files: ours of the table, theirs.
        copies: their names of further tensors that repeat a parameter, and our name of it.
        ignored: their names of tensors in old files that `transformers` does not read.
        predicting: a pattern of their names of tensors of multi-token prediction, which
            `transformers` does not read either; a note says so.
        constants: tensors that a model of ours lacks, with values that have no effect.
        seen: completes the content of config.json by what the tensors of the files show.
        nearest: the model that is written for one that `transformers` can only approximate, and why
            it is another; the model itself and "" for all others.
        rewards: whether `transformers` has its class with a head for rewards, of a causal decoder.
        stacks: number of blocks by the first part of their canonical names.
    """

    title: str
    model_type: str
    model_class: str | Callable[[ModelConfig], str]
    entries: tuple[Entry, ...]
    keys: Keys
    fixed: Mapping[str, Any]
    read: Callable[[HFConfigReader, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    features: frozenset[str] = frozenset()
    gated: bool | None = False
    activations: Mapping[str, dict[str, Any]] | None = None
    activation_names: Mapping[str, str] = field(default_factory=lambda: ACTIVATION_NAMES)
    requirements: tuple[Requirement, ...] = ()
    only_read: Keys = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    base_prefix: str = "model."
    endings: Mapping[str, str] = field(default_factory=dict)
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda model: (
        {} if untied(model) else dict.fromkeys(("lm_head.weight", "embed_out.weight"), _TABLE)
    )
    ignored: Callable[[ModelConfig], frozenset[str]] = lambda model: frozenset()
    predicting: Callable[[ModelConfig], str] = lambda model: ""
    constants: Callable[[ModelConfig], Mapping[str, Tensor]] = lambda model: {}
    seen: Callable[[dict[str, Any], Tensors], dict[str, Any]] = lambda content, tensors: content
    nearest: Callable[[ModelConfig], tuple[ModelConfig, str]] = lambda model: (model, "")
    stacks: Mapping[str, Callable[[ModelConfig], int]] = field(
        default_factory=lambda: {"layers": lambda model: model.num_layers}
    )
    family: str = ModelConfig.family
    rewards: bool = True
    task: Task | Callable[[ModelConfig], Task] = CAUSAL_LM

    def __post_init__(self) -> None:
        assert self.features <= set(FEATURES)

    def class_of(self, model: ModelConfig) -> str:
        """The class of a model in `transformers`."""
        named = self.model_class
        named = named if isinstance(named, str) else named(model)
        return _reward_class(named) if _has_rewards(model) else named

    def task_of(self, model: ModelConfig) -> Task:
        """The task of a model."""
        if _has_rewards(model):
            return REWARD
        return self.task if isinstance(self.task, Task) else self.task(model)

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json that describe the network, as transformers 4 and 5 read them."""
        values = vars(model.flags()) | {"activation": self.activation_names[model.mlp.activation]}
        return {
            "architectures": [self.class_of(model)],
            "model_type": self.model_type,
            "vocab_size": model.vocabulary.size,
            "tie_word_embeddings": model.embedding.tied,
            **{
                names if isinstance(names, str) else names[0]: values[ours]
                for names, ours in self.keys.items()
            },
            **self.write(model),
            **(_REWARD_KEYS if _has_rewards(model) else {}),
        }

    def model(self, content: dict[str, Any], path: Path) -> ModelConfig:
        """The network that a config.json at ``path`` describes, written by transformers 4 or 5.
        Raises CheckpointError if a value cannot be represented, or a key is not known."""
        given = HFConfigReader(content, path, self.title, self.model_type, self.defaults)
        vocab_size, tied = given.whole("vocab_size"), given.flag("tie_word_embeddings")
        # Without a key for it there is no dropout.
        fields = {"hidden_dropout": 0.0, **self.fixed}
        activations = self.activations or (GATES if self.gated else ACTIVATIONS)
        fields |= given.fields({**self.keys, **self.only_read}, activations)
        _derive_sizes(given, fields)
        fields |= self.read(given, fields)
        if self.task is CAUSAL_LM:
            fields |= _read_head(given)
        heads, groups = fields["num_attention_heads"], fields["num_query_groups"]
        if heads % groups:
            given.refuse(
                ("num_key_value_heads",), groups, f"it must divide num_attention_heads {heads}"
            )
        given.refuse_the_rest()
        flags = ModelFlags(
            **fields,
            seq_length=fields["max_position_embeddings"],
            family=self.family,
            untie_embeddings_and_output_weights=not tied,
            hf_architecture=self.model_type,
        )
        return resolved(flags, path).with_vocabulary(vocab_size)

    def misfits(self, model: ModelConfig) -> list[str]:
        """The flags that the configuration lacks to fit; empty when it fits."""
        if model.family != self.family:
            return [f"a model of the family {self.family}"]
        flags = model.flags()
        wanted = [
            spelled(name, value)
            for name, value in self.fixed.items()
            if getattr(flags, name) != value
        ]
        if self.gated and not model.mlp.gated:
            wanted.append("--swiglu or --glu-activation")
        if model.mlp.gated and self.gated is False:
            wanted.append("no --swiglu and no --glu-activation")
        wanted += [need.wanted for need in self.requirements if not need.holds(model)]
        allowed = self.features | set(self.keys.values()) | set(self.fixed)
        if self.rewards and self.task is CAUSAL_LM and _has_rewards(model):
            allowed |= {"head"}
        surplus = features_of(model) - allowed
        return wanted + [without(feature) for feature in FEATURES if feature in surplus]

    def parameters(self, model: ModelConfig) -> Iterator[Parameter]:
        """The table for one model: blocks in order, between what comes before and after them."""
        present = [entry for entry in self.entries if entry.when(model)]
        if _has_rewards(model):  # its head replaces the one for tokens
            present = [each for each in present if each.ours != "output_layer.weight"]
            present += weight("score", "score")
        for stack, entries in groupby(present, lambda entry: entry.stack):
            if stack is None:
                for entry in entries:
                    names = tuple(name.format(last=model.num_layers - 1) for name in entry.theirs)
                    yield Parameter(entry.ours, names, entry, model)
                continue
            repeated = list(entries)
            for n in range(self.stacks[stack](model)):
                for entry in repeated:
                    if entry.at is None or entry.at(model, n):
                        yield entry.of_block(model, n)

    def to_hf(
        self, model: ModelConfig, source: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in their form, from whole parameters by canonical name."""
        for parameter in self.parameters(model):
            yield from parameter.to_hf(source(parameter.ours)).items()


def _derive_sizes(given: HFConfigReader, fields: dict[str, Any]) -> None:
    """Fills in the sizes that the file leaves to others."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    fields["ffn_hidden_size"] = fields.get("ffn_hidden_size") or 4 * hidden
    fields["num_query_groups"] = fields.get("num_query_groups") or heads
    if fields.get("kv_channels") is None:
        if hidden % heads:
            given.refuse("num_attention_heads", heads, f"it must divide the hidden size {hidden}")
        fields["kv_channels"] = hidden // heads
