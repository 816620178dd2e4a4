"""What a table says: which of our parameters is which of Hugging Face's tensors, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.source import resolved
from megatron.config import ModelConfig, ModelFlags
from megatron.formats.huggingface.features import FEATURES, Requirement
from megatron.formats.huggingface.reorder import SAME, Reordering
from megatron.formats.huggingface.settings import HFConfigReader

TensorSource = Callable[[str], Tensor]
"""Gives a tensor by its name."""


def always(model: ModelConfig) -> bool:
    """The condition of an entry that every model has."""
    return True


@dataclass(frozen=True)
class Entry:
    """One kind of parameter in both forms.

    Attributes:
        ours: canonical name, with ``{n}`` for the number of the block.
        theirs: names of the tensors that hold it.
        form: how it lies in them.
        when: whether a model has this parameter.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Reordering = SAME
    when: Callable[[ModelConfig], bool] = always

    def __post_init__(self) -> None:
        assert len(self.theirs) == self.form.tensors, self.ours

    @property
    def repeated(self) -> bool:
        """Whether every block has one."""
        return "{n}" in self.ours


@dataclass(frozen=True)
class Parameter:
    """An entry for one parameter of one model.

    Attributes:
        ours: canonical name.
        theirs: names of the tensors that hold it.
        entry: the line of the table.
        model: shape of the network.
    """

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


@dataclass(frozen=True)
class Architecture:
    """An architecture of `transformers` and how our models map to it.

    Attributes:
        title: what people call it.
        model_type: its name in config.json, and for ``--architecture``.
        causal_lm: the class of `transformers`.
        entries: the table.
        requirements: what a configuration must be to fit.
        features: names of :data:`FEATURES` that its models may have.
        write: the keys of config.json that describe the network, but for the common ones.
        read: our fields from config.json; every key it asks for counts as understood.
        vocab_size: what config.json means when it does not say.
        tied: likewise, whether the head shares the token embedding.
        base_prefix: start of the names of all tensors but the head; files that were saved without
            a head lack it.
        family: of the models that it can hold.
    """

    title: str
    model_type: str
    causal_lm: str
    entries: tuple[Entry, ...]
    requirements: tuple[Requirement, ...]
    features: frozenset[str]
    write: Callable[[ModelConfig], dict[str, Any]]
    read: Callable[[HFConfigReader], dict[str, Any]]
    vocab_size: int
    tied: bool
    base_prefix: str = "model."
    family: str = ModelConfig.family

    def __post_init__(self) -> None:
        assert self.features <= set(FEATURES)

    def config(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json that describe the network, as transformers 4 and 5 read them."""
        return {
            "architectures": [self.causal_lm],
            "model_type": self.model_type,
            "vocab_size": model.vocabulary.size,
            "tie_word_embeddings": model.embedding.tied,
            **self.write(model),
        }

    def model(self, content: dict[str, Any], path: Path) -> ModelConfig:
        """The network that a config.json describes, written by transformers 4 or 5.

        Args:
            content: what is in it.
            path: where it is, for messages.

        Raises:
            CheckpointError: a value cannot be represented here, or a key is not known.
        """
        given = HFConfigReader(content, path, self.title)
        vocab_size = given.whole("vocab_size", self.vocab_size)
        tied = given.flag("tie_word_embeddings", self.tied)
        fields = self.read(given)
        given.refuse_the_rest()
        flags = ModelFlags(
            **fields,
            seq_length=fields["max_position_embeddings"],
            untie_embeddings_and_output_weights=not tied,
            hf_architecture=self.model_type,
        )
        return resolved(flags, path).with_vocabulary(vocab_size)

    def misfits(self, model: ModelConfig) -> list[str]:
        """What the configuration would have to be to fit; empty when it fits."""
        if model.family != self.family:
            return [f"a model of the family {self.family}"]
        return [need.wanted for need in self.requirements if not need.holds(model)] + [
            absent.wanted
            for name, absent in FEATURES.items()
            if name not in self.features and not absent.holds(model)
        ]

    def parameters(self, model: ModelConfig) -> Iterator[Parameter]:
        """The table for one model: blocks in order, between what comes before and after them."""
        present = [entry for entry in self.entries if entry.when(model)]
        places = [place for place, entry in enumerate(present) if entry.repeated]
        first, end = places[0], places[-1] + 1
        for entry in present[:first]:
            yield Parameter(entry.ours, entry.theirs, entry, model)
        for n in range(model.num_layers):
            for entry in present[first:end]:
                names = tuple(name.format(n=n) for name in entry.theirs)
                yield Parameter(entry.ours.format(n=n), names, entry, model)
        for entry in present[end:]:
            yield Parameter(entry.ours, entry.theirs, entry, model)

    def to_hf(self, model: ModelConfig, source: TensorSource) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in their form, from whole parameters by canonical name."""
        for parameter in self.parameters(model):
            yield from parameter.to_hf(source(parameter.ours)).items()

    def from_hf(self, model: ModelConfig, source: TensorSource) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, whole parameter without padding), from their tensors by name."""
        for parameter in self.parameters(model):
            yield parameter.ours, parameter.from_hf([source(name) for name in parameter.theirs])
