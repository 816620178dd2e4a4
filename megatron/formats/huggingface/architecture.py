"""An architecture of `transformers`: its config.json and its tensors, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

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
from megatron.formats.huggingface.entries import Entry
from megatron.formats.huggingface.reward import (
    REWARD,
    SCORE,
    has_rewards,
    read_head,
    reward_class,
    reward_keys,
)
from megatron.formats.huggingface.tasks import CAUSAL_LM, Task


@dataclass(frozen=True)
class Parameter:
    """An entry for one parameter of one model; ``ours`` and ``theirs`` have the block's number."""

    ours: str
    theirs: tuple[str, ...]
    entry: Entry
    model: ModelConfig

    def to_hf(self, values: Tensor) -> dict[str, Tensor]:
        """Their tensors, from the whole parameter without padding."""
        parts = self.entry.form.to_hf(values, self.model)
        return dict(zip(self.theirs, (part.contiguous() for part in parts), strict=True))

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`to_hf`: the whole parameter, from their tensors in order."""
        return self.entry.form.from_hf(tensors, self.model).contiguous()


_STACKS: dict[str, Callable[[ModelConfig], int]] = {"layers": lambda model: model.num_layers}


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
        features: members of :data:`FEATURES` that its models may have besides those of ``keys``.
        requirements: further conditions on a configuration.
        write: the other keys of config.json, which may replace some of ``keys``.
        read: the other fields, from config.json and the fields of ``keys``; every key that it reads
            counts as understood.
        only_read: further keys and fields, which are read and not written.
        defaults: defaults of keys that the configuration class of `transformers` does not have.
        activations: our flags by the name of an activation; by default those without a gate, or
            those of gates where the models are ``gated``. With None as ``gated`` there are both.
        activation_names: the name that is written for each activation.
        base_prefix: start of the names of all tensors but the head; files that were saved without a
            head lack it.
        endings: other endings of names in files: ours of the table, theirs.
        copies: their names of tensors that files of a model may have in addition, and our name of
            the parameter of which they are copies.
        ignored: their names of tensors in old files of a model that `transformers` does not read.
        constants: tensors of such a model that one of ours lacks, with values by which they have no
            effect.
        seen: completes the content of config.json by what the tensors of the files show.
        nearest: the model that is written for one that `transformers` can only approximate, with
            the same parameters, and why it is another; the model itself and "" for all others.
        stacks: number of blocks by the first part of their canonical names.
        family: family of our models.
        task: what its models do, or one of them.
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
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda model: _tied_heads(model)
    ignored: Callable[[ModelConfig], frozenset[str]] = lambda model: frozenset()
    constants: Callable[[ModelConfig], Mapping[str, Tensor]] = lambda model: {}
    seen: Callable[[dict[str, Any], Tensors], dict[str, Any]] = lambda content, tensors: content
    nearest: Callable[[ModelConfig], tuple[ModelConfig, str]] = lambda model: (model, "")
    stacks: Mapping[str, Callable[[ModelConfig], int]] = field(default_factory=lambda: _STACKS)
    family: str = ModelConfig.family
    task: Task | Callable[[ModelConfig], Task] = CAUSAL_LM

    def __post_init__(self) -> None:
        assert self.features <= set(FEATURES)

    def class_of(self, model: ModelConfig) -> str:
        """The class of a model in `transformers`."""
        named = self.model_class
        named = named if isinstance(named, str) else named(model)
        return reward_class(named) if has_rewards(model) else named

    def task_of(self, model: ModelConfig) -> Task:
        """What a model does."""
        if has_rewards(model):
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
            **(reward_keys() if has_rewards(model) else {}),
        }

    def model(self, content: dict[str, Any], path: Path) -> ModelConfig:
        """The network that a config.json at ``path`` describes, written by transformers 4 or 5.
        Raises CheckpointError if a value cannot be represented, or a key is not known."""
        given = HFConfigReader(content, path, self.title, self.model_type, self.defaults)
        vocab_size, tied = given.whole("vocab_size"), given.flag("tie_word_embeddings")
        # Without a key for it there is no dropout.
        fields = {"hidden_dropout": 0.0, **self.fixed}
        keys = {**self.keys, **self.only_read}
        activations = self.activations or (GATES if self.gated else ACTIVATIONS)
        fields |= given.fields(keys, activations)
        _derive_sizes(given, fields)
        fields |= self.read(given, fields)
        if self.task is CAUSAL_LM:
            fields |= read_head(given)
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
        if self.task is CAUSAL_LM and has_rewards(model):
            allowed |= {"head"}
        surplus = features_of(model) - allowed
        return wanted + [without(feature) for feature in FEATURES if feature in surplus]

    def parameters(self, model: ModelConfig) -> Iterator[Parameter]:
        """The table for one model: blocks in order, between what comes before and after them."""
        present = [entry for entry in self.entries if entry.when(model)]
        if has_rewards(model):
            present = [each for each in present if each.ours != "output_layer.weight"] + [*SCORE]
        for stack, entries in groupby(present, lambda entry: entry.stack):
            if stack is None:
                for entry in entries:
                    names = tuple(name.format(last=model.num_layers - 1) for name in entry.theirs)
                    yield Parameter(entry.ours, names, entry, model)
                continue
            repeated = list(entries)
            for n in range(self.stacks[stack](model)):
                for entry in repeated:
                    theirs = entry.first if entry.first and n == 0 else entry.theirs
                    names = tuple(name.format(n=n, before=n - 1) for name in theirs)
                    yield Parameter(entry.ours.format(n=n), names, entry, model)

    def to_hf(
        self, model: ModelConfig, source: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in their form, from whole parameters by canonical name."""
        for parameter in self.parameters(model):
            yield from parameter.to_hf(source(parameter.ours)).items()


def _tied_heads(model: ModelConfig) -> dict[str, str]:
    heads = ("lm_head.weight", "embed_out.weight") if model.embedding.tied else ()
    return dict.fromkeys(heads, "embedding.word_embeddings.weight")


def _derive_sizes(given: HFConfigReader, fields: dict[str, Any]) -> None:
    """Fills in the sizes that the file leaves to others."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    fields["ffn_hidden_size"] = fields.get("ffn_hidden_size") or 4 * hidden
    fields["num_query_groups"] = fields.get("num_query_groups") or heads
    if fields.get("kv_channels") is None:
        if hidden % heads:
            given.refuse("num_attention_heads", heads, f"it must divide the hidden size {hidden}")
        fields["kv_channels"] = hidden // heads
