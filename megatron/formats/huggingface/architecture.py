"""Mapping between an architecture of `transformers` (its config.json and tensors) and our models.

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
    """Access by name to the tensors in a folder's files."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor:
        """Read a tensor in the dtype in which its file stores it."""
        ...


@dataclass(frozen=True)
class Architecture:
    """An architecture of `transformers` and how our models map to it.

    Attributes:
        model_class: class name in `transformers`, or a function that returns it for a model.
        entries: table of the architecture's tensors.
        keys: keys of config.json that have the same meaning as a field of :class:`ModelFlags`.
        fixed: fields that have the same value in every model of the architecture.
        read: returns the other fields, given config.json and the fields of ``keys``. Every key that
            it reads counts as understood.
        write: returns the other keys of config.json, which may override some of ``keys``.
        features: members of :data:`FEATURES` that its models may have, in addition to the fields in
            ``keys``.
        gated: whether the MLP is gated; None if both kinds exist.
        activations: our flags by the name of an activation. The default depends on ``gated``.
        activation_names: name to write for each of our activations.
        requirements: further conditions on a configuration.
        only_read: further keys and their fields that are read but not written.
        defaults: default values for keys that the configuration class of `transformers` lacks.
        base_prefix: prefix of all tensor names except the head's. Files without a head omit it.
        endings: alternative suffixes of names in files, by the suffix in the table.
        beginnings: alternative prefixes of names in files, by the prefix in the table.
        copies: names of further tensors that repeat a parameter, with our name for it.
        ignored: names of tensors in old files that `transformers` does not read.
        predicting: regular expression for names of multi-token prediction tensors that are never
            read. Reading a folder that contains them adds a note.
        ahead: names for multi-token prediction, which is read if a run requests it (ahead.py).
        constants: tensors that our models lack, with the values that have no effect.
        optional: names of constants that files may omit.
        seen: completes the content of config.json from the tensors in the files.
        nearest: returns the model to write if `transformers` can only approximate ours, and why the
            two differ. For other models, returns the model itself and "".
        other_types: further values of ``model_type`` that are read in the same way.
        rewards: whether `transformers` has a causal decoder of this kind with a reward head.
        stacks: number of blocks of each stack, by the first part of their canonical names.
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
        """Return the name of the class in `transformers` for a model."""
        named = self.model_class
        named = named if isinstance(named, str) else named(model)
        return reward_class(named) if has_rewards(model) else named

    def task_of(self, model: ModelConfig) -> Task:
        """Return the task that a model was trained for, such as predicting the next token."""
        if has_rewards(model):
            return REWARD
        return self.task if isinstance(self.task, Task) else self.task(model)

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json's keys that describe the network, for transformers 4 and 5."""
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
        """Return the network that ``content`` describes, the config.json at ``path``, which
        transformers 4 or 5 wrote. Raises CheckpointError if a value cannot be represented or a key
        is unknown."""
        given = HFConfigReader(content, path, self.title, self.model_type, self.defaults)
        vocab_size, tied = given.whole("vocab_size"), given.flag("tie_word_embeddings")
        # Without a key for dropout, an architecture has none.
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
        """Return the flags that a model would need to fit, or an empty list if it fits."""
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
        """Yield a model's parameters: those before the blocks, those of each block, and those
        after."""
        present = [entry for entry in self.entries if entry.when(model)]
        if has_rewards(model):  # A reward head replaces the output layer.
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
        """Yield (name, tensor) pairs in the Hugging Face layout. ``source`` returns a whole
        parameter by its canonical name."""
        for parameter in self.parameters(model):
            yield from parameter.to_hf(source(parameter.ours)).items()


def _derive_sizes(given: HFConfigReader, fields: dict[str, Any]) -> None:
    """Fill in sizes that config.json leaves to be derived from others."""
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
