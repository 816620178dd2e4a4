"""An architecture of `transformers`: its config.json and its tensors, and ours.

Shapes: N query heads, K key and value heads, D head width, F inner width of the MLP, H hidden size.
Rows of our query-key-value weight are all queries, all keys, all values: [(N + 2K) D, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron.checkpoint.source import resolved
from megatron.config import ModelConfig, ModelFlags
from megatron.config.model import head_widths
from megatron.formats.features import FEATURES, Requirement, features_of, spelled, without
from megatron.formats.huggingface.config_reader import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    GATES,
    HFConfigReader,
    Keys,
)
from megatron.formats.huggingface.entries import TABLE, Entry, Parameter, untied, weight
from megatron.formats.huggingface.packed import check_quantization
from megatron.formats.huggingface.tasks import (
    CAUSAL_LM,
    REWARD,
    REWARD_KEYS,
    Task,
    has_rewards,
    read_head,
    reward_class,
)


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
        model_class: its class in `transformers`, or a function of the model that returns the class.
        entries: the table of its tensors.
        keys: keys of config.json that mean the same as a field of :class:`ModelFlags`.
        fixed: fields that have this value in every such model.
        read: the other fields, from config.json and the fields of ``keys``; every key that it reads
            is treated as understood.
        write: the other keys of config.json, which may replace some of ``keys``.
        features: members of :data:`FEATURES` that its models may have, besides the fields in
            ``keys``.
        gated: whether the MLP has a gate; None where both are possible.
        activations: our flags by the name of an activation; by default follows from ``gated``.
        activation_names: the name that is written for each activation.
        requirements: further conditions on a configuration.
        only_read: further keys and fields, which are read and not written.
        defaults: defaults of keys that the configuration class of `transformers` does not have.
        base_prefix: start of the names of all tensors but the head, which files of a model without
            a head lack.
        endings: other endings of names in files: ours of the table, theirs.
        beginnings: other beginnings of names in files, likewise.
        copies: their names of further tensors that repeat a parameter, and our name of it.
        ignored: their names of tensors in old files that `transformers` does not read.
        predicting: a pattern of their names of tensors of multi-token prediction that are never
            read; a note says so.
        ahead: the names of multi-token prediction, read where a run asks for it (ahead.py).
        constants: tensors that a model of ours lacks, with values that have no effect.
        optional: names of constants that files may lack.
        seen: completes the content of config.json by what the tensors of the files show.
        nearest: the model that is written for one that `transformers` can only approximate, and why
            it is another; the model itself and "" for all others.
        other_types: further values of model_type in files that are read alike.
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
    beginnings: Mapping[str, str] = field(default_factory=dict)
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda model: (
        {} if untied(model) else dict.fromkeys(("lm_head.weight", "embed_out.weight"), TABLE)
    )
    ignored: Callable[[ModelConfig], frozenset[str]] = lambda model: frozenset()
    predicting: Callable[[ModelConfig], str] = lambda model: ""
    ahead: Any = None
    constants: Callable[[ModelConfig], Mapping[str, Tensor]] = lambda model: {}
    optional: frozenset[str] = frozenset()
    seen: Callable[[dict[str, Any], Tensors], dict[str, Any]] = lambda content, tensors: content
    nearest: Callable[[ModelConfig], tuple[ModelConfig, str]] = lambda model: (model, "")
    stacks: Mapping[str, Callable[[ModelConfig], int]] = field(
        default_factory=lambda: {"layers": lambda model: model.num_layers}
    )
    family: str = ModelConfig.family
    rewards: bool = True
    other_types: tuple[str, ...] = ()
    task: Task | Callable[[ModelConfig], Task] = CAUSAL_LM

    def __post_init__(self) -> None:
        assert self.features <= set(FEATURES)

    def class_of(self, model: ModelConfig) -> str:
        """The class of a model in `transformers`."""
        named = self.model_class
        named = named if isinstance(named, str) else named(model)
        return reward_class(named) if has_rewards(model) else named

    def task_of(self, model: ModelConfig) -> Task:
        """The task of a model."""
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
            **(REWARD_KEYS if has_rewards(model) else {}),
            **({self.ahead.keys[0]: model.blocks_ahead} if self.ahead else {}),
        }

    def model(self, content: dict[str, Any], path: Path) -> ModelConfig:
        """The network that a config.json at ``path`` describes, written by transformers 4 or 5.
        Raises CheckpointError if a value cannot be represented, or a key is not known."""
        given = HFConfigReader(content, path, self.title, self.model_type, self.defaults)
        vocab_size, tied = given.whole("vocab_size"), given.flag("tie_word_embeddings")
        # Without a key for it there is no dropout.
        fields = {"hidden_dropout": 0.0, **self.fixed}
        fields |= given.fields({**self.keys, **self.only_read}, self._activations)
        _derive_sizes(given, fields)
        fields |= self.read(given, fields)
        if self.task is CAUSAL_LM:
            fields |= read_head(given)
        heads, groups = fields["num_attention_heads"], fields["num_query_groups"]
        if heads % groups:
            given.refuse(
                ("num_key_value_heads",), groups, f"it must divide num_attention_heads {heads}"
            )
        given.unused(*(self.ahead.keys if self.ahead else ()))
        check_quantization(given)
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
        if model.mlp.gated and "activation" in self.keys.values() and self.gated is not False:
            named = self._activations.get(self.activation_names[model.mlp.activation], {})
            if named.get("glu_activation") != model.mlp.activation:
                gates = {each.get("glu_activation"): None for each in self._activations.values()}
                wanted.append(f"--glu-activation {' or '.join(filter(None, gates))}")
        wanted += [need.wanted for need in self.requirements if not need.holds(model)]
        allowed = self.features | set(self.keys.values()) | set(self.fixed)
        if self.rewards and self.task is CAUSAL_LM and has_rewards(model):
            allowed |= {"head"}
        if self.ahead and model.blocks_ahead <= (self.ahead.most or model.blocks_ahead):
            allowed |= {"mtp_num_layers"}
        surplus = features_of(model) - allowed
        return wanted + [without(feature) for feature in FEATURES if feature in surplus]

    @property
    def _activations(self) -> Mapping[str, dict[str, Any]]:
        return self.activations or (GATES if self.gated else ACTIVATIONS)

    def parameters(self, model: ModelConfig) -> Iterator[Parameter]:
        """The table for one model: blocks in order, between what comes before and after them."""
        present = [entry for entry in self.entries if entry.when(model)]
        if has_rewards(model):  # its head replaces the one for tokens
            present = [each for each in present if each.ours != "output_layer.weight"]
            present += weight("score", "score")
        for stack, entries in groupby(present, lambda entry: entry.stack):
            if stack is None:
                for entry in entries:
                    ends = {"last": model.num_layers - 1}
                    ends["decoder_last"] = (model.decoder_num_layers or 0) - 1
                    names = tuple(name.format(**ends) for name in entry.theirs)
                    yield Parameter(entry.ours, names, entry, model)
                continue
            repeated = list(entries)
            for n in range(self.stacks[stack](model)):
                for entry in repeated:
                    if entry.at is None or entry.at(model, n):
                        yield entry.of_block(model, n)
        if self.ahead is not None:
            yield from self.ahead.parameters(present, model)

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
    widths = head_widths(fields)
    if widths is not None:
        fields["kv_channels"] = widths[0]
    if fields.get("kv_channels") is None:
        if hidden % heads:
            given.refuse("num_attention_heads", heads, f"it must divide the hidden size {hidden}")
        fields["kv_channels"] = hidden // heads
