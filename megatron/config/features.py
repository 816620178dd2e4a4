"""The features: folders next to the core, each of which can add to a run.

A feature is a folder of ``megatron/features`` or ``megatron/apps`` whose ``feature.py`` has a
subclass of :class:`Feature` as ``FEATURE``. No list names them: a folder that is removed is a
feature less, and its flags go with it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, Self

from megatron.config.flags import ConfigResolver, Settings

FOLDERS = ("megatron.features", "megatron.apps")
"""Where features are. This is the only place of the core that names them."""

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
        """Whether batches of a GPT have the identity of every sample, to store what is computed of
        each."""
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
    def reads_all(self) -> bool:
        """Whether the flags declare all data paths to be files of this kind."""
        return False

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of data paths that are files of this kind, unless they are prefixes of a .bin."""
        return ()

    @property
    def acts(self) -> bool:
        """Whether the kind changes samples or their order in this run."""
        return False

    @property
    def pads_batches(self) -> bool:
        """Whether packed samples are as long as their batch needs."""
        return False

    @property
    def weigh_by(self) -> str | None:
        """Weights of packed samples in the loss of a step, as of ``GPTCollator``."""
        return None

    @property
    def head(self) -> tuple[str, str] | None:
        """The head of a GPT that is trained on the kind, if it predicts no tokens, and the flag
        that asks for it."""
        return None


class ModelPart:
    """Flags of a feature that are fields of ``ModelFlags``, and what they resolve to in a network.

    Attributes:
        families: names of the families whose models depend on them; None for all.
    """

    families: ClassVar[frozenset[str] | None] = None

    @property
    def idle(self) -> bool:
        """Whether the network has nothing of the feature."""
        return False

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> Self:
        """The part of a network with so many layers and tokens, complete; ``longest`` is the most
        positions that a sequence can have, None for any number. Raises ConfigError."""
        return self

    def check_lengths(self, lengths: Sequence[int], source: str) -> None:
        """Refuses lengths of sequences, which ``source`` has, that the network cannot read."""


class Feature:
    """What a folder adds to a run.

    Hooks have defaults that add nothing. They import the folder's other modules when they are
    called, so that a run pays for the features that it uses.

    Attributes:
        needs: names of the features without which this one does not exist.
        sections: the class of flags of each section of a saved configuration.
        model_parts: classes of flags of the network.
        families: names of the model families that :meth:`family` returns.
        tokenizers: values of ``--tokenizer-type`` that :meth:`tokenizer` returns.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[Mapping[str, type[FlagSection]]] = {}
    model_parts: ClassVar[tuple[type[ModelPart], ...]] = ()
    families: ClassVar[tuple[str, ...]] = ()
    tokenizers: ClassVar[tuple[str, ...]] = ()

    # The configuration of a run.

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        """The settings of a run before they are resolved, with what flags of the feature imply;
        ``run_of`` makes a run of others."""
        return settings

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        """Replaces sections in ``parts``, by name, by complete ones. The parts of the core are
        complete, except that of the engine. Raises ConfigError."""

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        """Refuses values of a :class:`~megatron.config.run.RunConfig` that contradict each other.
        Raises ConfigError."""

    # What a run reads and writes.

    def tokenizer(self, name: str) -> Any:
        """The :class:`~megatron.tokenizer.registry.TokenizerType` of that name."""
        raise AssertionError(f"{self} has no tokenizer {name}")

    def batch_encoder(self) -> Any:
        """A class that encodes batches of text by merges, for ``--bpe-library``; None by default.
        Raises ConfigError if its library is not installed."""
        return None

    def open_url(self, url: str, cache_path: str | None) -> Any:
        """An :class:`~megatron.data.indexed.IndexedDataset` at an address; None if the feature does
        not read it."""
        return None

    def corpora(self, config: Any) -> Mapping[str, Any] | None:
        """Corpora that a run may name without a corpora file, each a
        :class:`~megatron.data.sources.DataSource`. ``config`` is that of the run, if there is
        one."""
        return None

    def checkpoints(self, config: Any) -> Mapping[str, str | None]:
        """Paths of the checkpoints that a run reads besides that of ``--load``, by flag."""
        return {}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        """Inputs that a continued run must have in common with the run before; see
        :mod:`megatron.run.inputs`."""
        return {}

    def folders(self, config: Any) -> Mapping[str, str | None]:
        """Folders that every node of a run must see, by flag."""
        return {}

    def data_kind(self, section: str) -> Any:
        """The :class:`~megatron.data.pipeline.DataKind` whose flags are in a section."""
        raise AssertionError(f"{self} has no kind of data {section}")

    def family(self, name: str) -> Any:
        """The :class:`~megatron.families.family.Family` of that name."""
        raise AssertionError(f"{self} has no family {name}")


@cache
def features() -> Mapping[str, Feature]:
    """All features by the name of their folder, sorted."""
    found = {}
    for parent in FOLDERS:
        if find_spec(parent) is None:
            continue
        for module in pkgutil.iter_modules(import_module(parent).__path__):
            name = f"{parent}.{module.name}.feature"
            if module.ispkg and find_spec(name) is not None:
                found[module.name] = import_module(name).FEATURE
    complete = {name: one for name, one in found.items() if found.keys() >= set(one.needs)}
    return MappingProxyType(dict(sorted(complete.items())))


@cache
def section_classes() -> Mapping[str, type[FlagSection]]:
    """The flags of all features by the name of their section, in the order of --help."""
    sections = [s for feature in features().values() for s in feature.sections.items()]
    sections.sort(key=lambda section: (not issubclass(section[1], KindConfig), section[0]))
    return MappingProxyType(dict(sections))


@cache
def model_parts() -> tuple[type[ModelPart], ...]:
    """The flags of the network that features add, in the order of --help."""
    return tuple(part for feature in features().values() for part in feature.model_parts)


@cache
def kind_classes() -> Mapping[str, type[KindConfig]]:
    """The flags of all kinds of data by the name of their section, sorted."""
    kinds = {n: cls for n, cls in section_classes().items() if issubclass(cls, KindConfig)}
    return MappingProxyType(kinds)


def file_kinds() -> dict[str, str]:
    """The kinds that read files, by their name in a corpora file."""
    return {cls.files: name for name, cls in kind_classes().items() if cls.files is not None}
