"""Flag classes of features: sections of their own, kinds of data, and additions to core classes.

Also describes the KV cache or recurrent state that generation keeps for each block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from megatron.config.flags import ConfigResolver

C = TypeVar("C")

DOCUMENTS, PACKED = "documents", "packed"
"""Values of :attr:`KindConfig.samples`."""


class FlagSection:
    """Flags of a feature that form a section of saved configurations and a group of --help.

    Attributes:
        after: core section that it follows. Kinds of data come first, then the order is by name.
    """

    after: ClassVar[str] = "data"

    @property
    def identifies_samples(self) -> bool:
        """True if a GPT's batches must include an identifier for each sample."""
        return False

    @property
    def replaces_losses(self) -> str | None:
        """Given flag that makes a run compute token losses in another way, or None."""
        return None

    @property
    def trains(self) -> bool:
        """True if the flags select trainable weights, which a frozen model does not have."""
        return False


class KindConfig(FlagSection):
    """Flags of a kind of data, and properties that are needed before its module is imported.

    Attributes:
        files: name of the kind in a corpora file; None if it reads no files.
        samples: ``documents`` if every model makes its own samples from documents; ``packed`` if
            several examples may share a sample; or another value, for models that accept it.
        shares: flags of other kinds that this kind uses too.
        streams: flags that only affect samples cut from a stream of documents.
        idle: why the flags have no effect in a run that does not use the kind.
    """

    files: ClassVar[str | None] = None
    samples: ClassVar[str] = DOCUMENTS
    shares: ClassVar[frozenset[str]] = frozenset()
    streams: ClassVar[frozenset[str]] = frozenset()
    idle: ClassVar[str] = "nothing in this run uses it"
    eval_text_key: str | None = None

    @property
    def moves_text(self) -> str | None:
        """Given flag that moves text within samples, or None."""
        return None

    @property
    def reads_all(self) -> bool:
        """True if the flags declare that all data paths are files of this kind."""
        return False

    @property
    def endings(self) -> tuple[str, ...]:
        """File name extensions of this kind of data, unless a path is the prefix of a .bin file."""
        return ()

    @property
    def acts(self) -> bool:
        """True if the kind changes samples or their order in this run."""
        return False

    @property
    def head(self) -> tuple[str, str] | None:
        """Output head of a GPT that this kind of data trains, and the flag that selects it; None if
        the GPT predicts tokens."""
        return None


@dataclass(frozen=True)
class KeysAndValues:
    """KV cache of a block: for each token, a key and a value vector for each of this
    tensor-parallel rank's ``heads`` heads, with ``width`` elements in the dtype of the weights."""

    heads: int
    width: int
    tensors: ClassVar[int] = 2


@dataclass(frozen=True)
class Latents:
    """Cache of a block with latent attention: one vector of ``width`` elements per token, shared by
    all heads of all tensor-parallel ranks. It is the key, and its first elements are the value."""

    width: int
    heads: ClassVar[int] = 1
    tensors: ClassVar[int] = 1


@dataclass(frozen=True)
class States:
    """Recurrent state of a block: tensors of these shapes for each sequence on this tensor-parallel
    rank, in float32, or float64 if the model is. ``LayerCache.recur`` passes them to ``step`` and
    takes them back in this order, without the batch axis."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def numbers(self) -> int:
        """Number of elements per sequence."""
        return sum(math.prod(shape) for shape in self.shapes)


TokenMemory = KeysAndValues | Latents
LayerMemory = TokenMemory | States


def memory_of(model: Any, layer: int, tensor_size: int = 1) -> LayerMemory | None:
    """Return the cache or state that generation keeps for a block of a
    :class:`~megatron.config.ModelConfig` on one of ``tensor_size`` tensor-parallel ranks; None for
    a block without attention. Multi-token prediction blocks are like the last block."""
    layer = min(layer, model.blocks - 1)
    if not model.has("attention", layer):
        return None
    kept = (part.memory(layer, model, tensor_size) for part in model.parts)
    heads = max(1, model.attention.num_query_groups // tensor_size)
    usual = KeysAndValues(heads, model.attention.kv_channels)
    return next((memory for memory in kept if memory is not None), usual)


class ModelPart:
    """Flags of a feature that are fields of ``ModelFlags`` and, when resolved, a part of a network.

    Attributes:
        families: names of the families whose models depend on the flags; None for all.
    """

    families: ClassVar[frozenset[str] | None] = None

    @property
    def idle(self) -> bool:
        """True if the network does not use the feature."""
        return False

    @property
    def replaces_layers(self) -> bool:
        """True if the feature replaces or removes the attention or MLP of some blocks."""
        kinds = type(self)
        return kinds.memory is not ModelPart.memory or kinds.lacks is not ModelPart.lacks

    @property
    def blocks_ahead(self) -> int:
        """Number of multi-token prediction blocks, which are configured like the last block."""
        return 0

    def further_blocks(self, model: Any) -> int:
        """Return the number of blocks of stacks that only the feature's families have."""
        return 0

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> Self:
        """Return the resolved part of a network with ``layers`` blocks. ``longest`` is the maximum
        number of positions in a sequence, or None if there is no limit. Raises ConfigError."""
        return self

    def head_widths(self) -> tuple[int, int] | None:
        """Return the number of channels of a query or key head and how many of them can be rotated,
        or None if the flags do not determine them."""
        return None

    def lacks(self, layer: int) -> str | None:
        """Return the sublayer that a block lacks, ``attention`` or ``mlp``, or None."""
        return None

    def memory(self, layer: int, model: Any, tensor_size: int) -> LayerMemory | None:
        """Return the cache or state that generation keeps for a block with attention on one of
        ``tensor_size`` tensor-parallel ranks; None if this feature does not change it. ``model`` is
        a :class:`~megatron.config.ModelConfig`."""
        return None

    def check_lengths(self, lengths: Sequence[int], source: str) -> None:
        """Raise ConfigError if the network cannot read these lengths, found in ``source``."""


class FlagPart:
    """Flags of a feature that are added to a class of the core. The class gets the fields,
    properties and methods, which override the core's.

    Attributes:
        before: core field that the flags precede in --help, for all of them or by flag. None is the
            end.
    """

    before: ClassVar[str | Mapping[str, str] | None] = None

    @classmethod
    def of(cls, flags: Any) -> Self:
        """Return the instance of the whole class, typed as this part."""
        assert isinstance(flags, cls), type(flags)
        return flags


def with_parts(parts: Sequence[type[FlagPart]]) -> Callable[[type[C]], type[C]]:
    """Return a decorator that adds the flags of features to a flag class of the core."""

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
