"""Flags of features: sections of their own, kinds of data, and parts of the core's classes.

With them stands the memory that generation keeps for a block, which flags of a network decide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from megatron.config.flags import ConfigResolver

C = TypeVar("C")

DOCUMENTS, PACKED = "documents", "packed"
"""Samples of :attr:`KindConfig.samples`."""


class FlagSection:
    """Flags of a feature: a section of saved configurations and a group of --help.

    Attributes:
        after: the section of the core that it follows. Kinds of data come first, then by name.
    """

    after: ClassVar[str] = "data"

    @property
    def identifies_samples(self) -> bool:
        """True if batches of a GPT have the identity of every sample."""
        return False

    @property
    def replaces_losses(self) -> str | None:
        """The flag by which a run computes losses of tokens in another way; None without it."""
        return None

    @property
    def trains(self) -> bool:
        """True if the flags choose weights that are trained, which a frozen model lacks."""
        return False


class KindConfig(FlagSection):
    """Flags of a kind of data, and what is known of it before its module is imported.

    Attributes:
        files: the kind's name in a corpora file; None if it reads no files.
        samples: ``documents``, from which every model makes its own samples; ``packed``, examples
            of which several may share a sample; or others, for the models that accept them.
        shares: flags of other kinds that this one depends on, too.
        streams: flags that only samples cut from a stream of documents depend on.
        idle: why the flags change nothing in a run that does not use the kind.
    """

    files: ClassVar[str | None] = None
    samples: ClassVar[str] = DOCUMENTS
    holds_text: ClassVar[bool] = False
    shares: ClassVar[frozenset[str]] = frozenset()
    streams: ClassVar[frozenset[str]] = frozenset()
    idle: ClassVar[str] = "nothing in this run uses it"
    eval_text_key: str | None = None

    @property
    def moves_text(self) -> str | None:
        """The flag by which text changes its place within samples; None without it."""
        return None

    @property
    def reads_all(self) -> bool:
        """True if the flags declare all data paths to be files of this kind."""
        return False

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of data paths that are files of this kind, unless they are prefixes of a .bin."""
        return ()

    @property
    def acts(self) -> bool:
        """True if the kind changes samples or their order in this run."""
        return False

    @property
    def pads_batches(self) -> bool:
        """True if packed samples are as long as their batch needs."""
        return False

    @property
    def weigh_by(self) -> str | None:
        """Weights of packed samples in the loss of a step, for their collator."""
        return None

    @property
    def head(self) -> tuple[str, str] | None:
        """The head of a GPT that is trained on the kind, if it predicts no tokens, and the flag
        that asks for it."""
        return None


@dataclass(frozen=True)
class KeysAndValues:
    """A key and a value of each token for each of ``heads`` heads of this tensor-parallel rank,
    ``width`` numbers each, in the dtype of the weights."""

    heads: int
    width: int
    tensors: ClassVar[int] = 2


@dataclass(frozen=True)
class Latents:
    """One vector of ``width`` numbers of each token, which all heads of all tensor-parallel ranks
    read, in the dtype of the weights: the key, whose first numbers are the value."""

    width: int
    heads: ClassVar[int] = 1
    tensors: ClassVar[int] = 1


@dataclass(frozen=True)
class States:
    """Tensors of these shapes for each sequence on this tensor-parallel rank, in float32, or in
    float64 if the model is. They are what ``step`` of ``LayerCache.recur`` takes and returns, in
    this order, without the axis of sequences."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def numbers(self) -> int:
        """Numbers of one sequence."""
        return sum(math.prod(shape) for shape in self.shapes)


TokenMemory = KeysAndValues | Latents
LayerMemory = TokenMemory | States


def memory_of(model: Any, layer: int, tensor_size: int = 1) -> LayerMemory | None:
    """Return the memory of a block of a :class:`~megatron.config.ModelConfig` on one of
    ``tensor_size`` ranks; None for a block without attention. Blocks after the last one, which
    predict further tokens, are as the last one."""
    layer = min(layer, model.blocks - 1)
    if not model.has("attention", layer):
        return None
    for part in model.parts:
        memory: LayerMemory | None = part.memory(layer, model, tensor_size)
        if memory is not None:
            return memory
    heads = max(1, model.attention.num_query_groups // tensor_size)
    return KeysAndValues(heads, model.attention.kv_channels)


class ModelPart:
    """Flags of a feature that are fields of ``ModelFlags``, and what they resolve to in a network.

    Attributes:
        families: names of the families whose models depend on them; None for all.
    """

    families: ClassVar[frozenset[str] | None] = None

    @property
    def idle(self) -> bool:
        """True if the network has nothing of the feature."""
        return False

    @property
    def replaces_layers(self) -> bool:
        """True for features whose blocks have other layers than attention and an MLP."""
        kinds = type(self)
        return kinds.memory is not ModelPart.memory or kinds.lacks is not ModelPart.lacks

    @property
    def blocks_ahead(self) -> int:
        """Number of blocks after the last layer, with its configuration, that predict further
        tokens."""
        return 0

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> Self:
        """The part of a network with so many layers and tokens, complete; ``longest`` is the most
        positions that a sequence can have, None for any number. Raises ConfigError."""
        return self

    def head_widths(self) -> tuple[int, int] | None:
        """Channels of a query or key head, and those of them that rotary positions can rotate,
        where the flags say them; None where they are those of ``--kv-channels``."""
        return None

    def lacks(self, layer: int) -> str | None:
        """``attention`` or ``mlp`` for a block without it; None for a block with both."""
        return None

    def memory(self, layer: int, model: Any, tensor_size: int) -> LayerMemory | None:
        """Return what generation keeps for a block with attention of a
        :class:`~megatron.config.ModelConfig` on one of so many tensor-parallel ranks; None for keys
        and values, or what another feature says."""
        return None

    def check_lengths(self, lengths: Sequence[int], source: str) -> None:
        """Refuses lengths of sequences, which ``source`` has, that the network cannot read."""


class FlagPart:
    """Flags of a feature among those of a class of the core: their fields, properties and methods
    are also those of the whole class, and override the core's.

    Attributes:
        before: the field of the core that they precede in --help, or that of each, by their names;
            None for the end.
    """

    before: ClassVar[str | Mapping[str, str] | None] = None

    @classmethod
    def of(cls, flags: Any) -> Self:
        """The flags of the whole class, as those of this part."""
        assert isinstance(flags, cls), type(flags)
        return flags


def with_parts(parts: Sequence[type[FlagPart]]) -> Callable[[type[C]], type[C]]:
    """Decorator of a class of flags: the class with those of features."""

    def join(core: type[C]) -> type[C]:
        if not parts:
            return core
        names = {"__doc__": core.__doc__, "__module__": core.__module__}
        whole: Any = dataclasses.dataclass(frozen=True, kw_only=True)(
            type(core.__name__, (*parts, core), names)
        )
        places = {
            field.name: at.get(field.name) if isinstance(at := part.before, Mapping) else at
            for part in parts
            for field in dataclasses.fields(part)  # type: ignore[arg-type]
        }
        order: list[str] = []
        for own in dataclasses.fields(core):  # type: ignore[arg-type]
            order += [*(name for name, at in places.items() if at == own.name), own.name]
        order += [name for name, at in places.items() if at is None]
        fields = {field.name: field for field in dataclasses.fields(whole)}
        assert len(order) == len(fields), fields.keys() - set(order)
        whole.__dataclass_fields__ = {name: fields[name] for name in order}
        return whole  # type: ignore[no-any-return]

    return join
