"""The features: folders next to the core, each of which can add to a run.

A feature is a folder of ``megatron/features`` or ``megatron/apps`` whose ``feature.py`` has a
subclass of :class:`Feature` as ``FEATURE``. No list names them: a folder that is removed is a
feature less, and its flags go with it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

from megatron.config.flags import ConfigResolver, Settings
from megatron.config.sections import DOCUMENTS, PACKED, FlagPart, FlagSection, KindConfig, ModelPart  # noqa: F401  # declarations import them from here
from megatron.config.training_hooks import TrainingHooks

FOLDERS = ("megatron.features", "megatron.apps")
"""Packages that contain features. This is the only place of the core that names them."""

AHEAD = "mtp."
"""Prefix of the canonical names of multi-token prediction blocks."""


class Feature(TrainingHooks):
    """Hooks by which a folder adds to a run.

    Hooks have defaults that add nothing. They import the folder's other modules when they are
    called, so that a run pays for the features that it uses.

    Attributes:
        needs: names of features whose modules this one imports.
        sections: the class of flags of each section of a saved configuration.
        flag_parts: flags in a section of the core, by its name.
        model_parts: classes of flags of the network.
        families: names of the model families that :meth:`family` returns.
        heads: kinds of the last layer, as ``ModelConfig.head`` says, that :meth:`network` adds to
            models of a family, by the family's name.
        tokenizers: values of ``--tokenizer-type`` that :meth:`tokenizer` returns.
        only_trained: how the canonical names of parameters begin that only training uses, and
            which models written for other programs leave out.
        optimizers: values of ``--optimizer`` that :meth:`optimizer` returns, with the names of the
            states of a parameter.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[Mapping[str, type[FlagSection]]] = {}
    flag_parts: ClassVar[Mapping[str, type[FlagPart]]] = {}
    model_parts: ClassVar[tuple[type[ModelPart], ...]] = ()
    families: ClassVar[tuple[str, ...]] = ()
    heads: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    tokenizers: ClassVar[tuple[str, ...]] = ()
    only_trained: ClassVar[tuple[str, ...]] = ()
    optimizers: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})

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

    def advice(
        self, flag: str, prog: str, known: Container[str], of_training: Callable[[], Container[str]]
    ) -> str | None:
        """Words about a flag, or a word without dashes, that ``prog``, whose flags are ``known``,
        does not have; None for none. ``of_training`` returns the flags of pretrain_gpt.py."""
        return None

    # What a run reads and writes.

    def tokenizer(self, name: str) -> Any:
        """The :class:`~megatron.tokenizer.registry.TokenizerType` of that name."""
        raise AssertionError(f"{self} has no tokenizer {name}")

    def tokenizer_files(self, config: Any, published: Any) -> Any:
        """The ``TokenizerConfig`` with the files of a published model, which flags describe; None
        to leave them."""
        return None

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

    def named_sources(self, config: Any, kind_of: Callable[[str], str]) -> Any:
        """A function of words of ``--train-data`` and the like and of the flag, which returns each
        :class:`~megatron.data.sources.DataSource`; None where a run names no corpora. ``kind_of``
        gives the kind of a path's files."""
        return None

    def checkpoints(self, config: Any) -> Mapping[str, str | None]:
        """Paths of the checkpoints that a run reads besides that of ``--load``, by flag."""
        return {}

    def formats(self) -> Sequence[Any]:
        """Each :class:`~megatron.checkpoint.source.Format` of checkpoints that the feature adds."""
        return ()

    def architectures(self) -> Sequence[Any]:
        """Each :class:`~megatron.formats.huggingface.architecture.Architecture` of Hugging Face
        that the feature adds."""
        return ()

    def conversions(self) -> Mapping[str, Callable[[], Any]]:
        """Commands of ``tools/convert_checkpoint.py`` by name: each imports a function of the words
        that follow on the command line."""
        return {}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        """Inputs that a continued run must have in common with the run before: ``path``, ``folder``
        and a digest of the ``content``, by their names."""
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

    # Hooks of processes, models, engines and trainings; see docs/design/structure.md.

    after: ClassVar[tuple[str, ...]] = ()
    """Names of features whose hooks are called before those of this one, where they exist."""
    training_flags: ClassVar[Sequence[type]] = ()
    """Classes of flags that an evaluation does not use."""
    json_sections: ClassVar[tuple[str, ...]] = ()
    """Sections of a DeepSpeed JSON that the feature reads instead of DeepSpeed: the setting of the
    same name is the text of the section."""

    def json_file(self, text: str, content: Any, path: str) -> Any:
        """Return the object of a DeepSpeed JSON file, as far as DeepSpeed gets it, from its
        ``text`` and ``content``, None if it is not JSON. Raises ConfigError for what is wrong."""
        return content

    def json_notes(self, content: Mapping[str, Any], path: str) -> Sequence[str]:
        """Lines for the user about the DeepSpeed JSON of a file, empty without one."""
        return ()

    def check_json(self, sections: Mapping[str, str]) -> None:
        """Raise ConfigError for wrong texts of :attr:`json_sections`, by name."""

    def check_engine(self, content: Mapping[str, Any], config: Any) -> Sequence[str]:
        """Return lines for the user about a completed DeepSpeed JSON. Raises ConfigError where it
        contradicts the run."""
        return ()

    def engine_settings(self, settings: dict[str, Any], on_cpu: bool) -> None:
        """Change the settings of DeepSpeed's engine where the hook :meth:`built` does something
        itself. Raises ConfigError for what the engine's device cannot do."""

    def launch(self, settings: Settings, argv: Sequence[str] | None) -> int | None:
        """Called before the processes of a run are counted: may start them, with the words ``argv``
        or those of this process, and end this one. Return their number where the settings are only
        explained, else None."""
        return None

    def start(self, settings: Settings, processes: int) -> int:
        """Called in each of the ``processes`` of a run before it resolves its settings: return
        their number, which may be another one where processes start again."""
        return processes

    def meeting(self) -> Any:
        """The :class:`~megatron.parallel.meeting.Meeting` of a run's processes; None for none."""
        return None

    def watch(self, config: Any) -> AbstractContextManager[Any] | None:
        """A context that watches a process of a run, a :class:`~megatron.run.process.Watch`; None
        for none."""
        return None

    def network(self, spec: Any, model: Any, parallel: Any) -> Any:
        """The :class:`~megatron.model.spec.ModelSpec` of a network, whatever it is for, from that
        of its family; ``model`` and ``parallel`` are its configuration and its layout."""
        return spec

    def model(self, spec: Any, config: Any) -> Any:
        """The :class:`~megatron.model.spec.ModelSpec` of a run, from that of its family."""
        return spec

    def mlp(self, config: Any, layer: int, tp: Any) -> Any:
        """The module that replaces the MLP of a block, from hidden states and the
        :class:`~megatron.model.layer_list.LayerState` to both; None for an
        :class:`~megatron.model.mlp.MLP`. ``config`` is a :class:`~megatron.config.ModelConfig`."""
        return None

    def mixer(self, config: Any, layer: int, tp: Any, recompute: bool) -> Any:
        """The module that replaces the causal attention of a block, from hidden states and the
        :class:`~megatron.model.layer_list.LayerState` to hidden states; None for an
        :class:`~megatron.model.attention.Attention`, whose arguments these are."""
        return None

    def attention(self, attend: Any, config: Any, layer: int, tp: Any, kind: str) -> Any:
        """The :data:`~megatron.model.attention_backends.AttentionBackend` of a block, from the one
        that it has without the feature; ``kind`` is its ``AttentionKind``."""
        return attend

    def attention_kernel(self, name: str, dropout: float) -> Any:
        """The :data:`~megatron.model.attention_backends.AttentionBackend` of a value of
        ``--attention-backend`` but eager, for attention with dropout of this probability; None
        where the feature has none. Raises ConfigError if a package or a GPU for it is missing."""
        return None

    def attention_line(
        self, config: Any, dtype: Any, device: Any, tensor: int, documents: bool, kind: Any
    ) -> str | None:
        """A line about the attention kernels of a run, see
        :func:`~megatron.model.attention_backends.describe_attention`; None for none."""
        return None

    def base(self, spec: Any, config: Any) -> tuple[Any, int] | None:
        """The model that training starts from, in the form in which the feature keeps its weights,
        and a number that names the form; ``spec``: as its family makes it. None for the form of its
        checkpoint."""
        return None

    def load_base(self, engine: Any, source: Any) -> None:
        """Load the weights of ``source`` into an evaluator of a model that :meth:`base` returned;
        every rank calls it."""

    def shape(self, shape: Any, config: Any) -> Any:
        """The :class:`~megatron.model.flops.TransformerShape` of a run's model."""
        return shape

    def check_device(self, config: Any, device: Any) -> None:
        """Raise ConfigError for a device that cannot do what the flags say, before the model is
        built."""

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        """Return the reason, to follow the value of ``--torch-compile``, for which blocks are not
        compiled; ``automatic``: the value is ``auto``, and compiling has to repay."""
        return None

    def kernels(self, blocks: Sequence[Any], config: Any) -> None:
        """Set the :class:`~megatron.parallel.linear.LinearKernel` of layers of these blocks."""

    def kernel_states(
        self,
        blocks: Sequence[Any],
        names: Mapping[Any, str],
        config: Any,
        mesh: Any,
        partitioned: bool,
    ) -> Any:
        """The :class:`~megatron.parallel.linear.KernelStates` of layers or kernels of the feature,
        where there are any; ``names``: of each parameter; ``partitioned``: whether processes have
        parts of the weights (ZeRO 3). None for none."""
        return None

    def optimizer(self, config: Any, trained: Mapping[Any, str], mesh: Any) -> Any:
        """The :class:`~megatron.engine.update.optimizer.OptimizerPlan` of a run for the parameters
        that are trained, with their names; None for an optimizer of others."""
        return None

    def update_factors(
        self, config: Any, names: Mapping[Any, str], rules: Mapping[Any, str]
    ) -> Mapping[Any, Any]:
        """Factors of learning rate, decay and epsilon of every parameter that is trained, each a
        :class:`~megatron.engine.update.optimizer.Factors`, by canonical ``names`` and the ``rules``
        of an optimizer of features; empty, on all ranks, for none."""
        return {}

    def group_factors(
        self, config: Any, names: Mapping[Any, str], factors: Mapping[Any, Any]
    ) -> Mapping[Any, Any]:
        """Change the factors that :meth:`update_factors` of all features makes."""
        return factors

    def group_lines(
        self, config: Any, names: Mapping[Any, str], factors: Mapping[Any, Any], mesh: Any
    ) -> Sequence[str]:
        """Lines about groups of parameters with other factors than all. Raises ConfigError, on
        every rank, if flags choose parameters that no pipeline stage has."""
        return ()

    def stored_states(self, config: Any) -> Any:
        """The :class:`~megatron.engine.update.adam.StateStore` of the optimizer; None for
        float32."""
        return None

    def built(self, engine: Any) -> None:
        """Called with a :class:`~megatron.engine.train_engine.TrainEngine` that has just been
        built."""

    def load(self, engine: Any, source: Any, fresh: Sequence[str], continues: bool) -> Any:
        """Load the weights of ``source`` in the feature's own way, except the parameters ``fresh``,
        which it lacks. Return the source from which optimizer and random state are loaded; None to
        leave the weights to the engine."""
        return None


@cache
def features() -> Mapping[str, Feature]:
    """All features by the name of their folder, sorted, without those that need a missing one."""
    by_name: dict[str, Feature] = {}
    for parent in FOLDERS:
        if find_spec(parent) is None:
            continue
        for module in pkgutil.iter_modules(import_module(parent).__path__):
            name = f"{parent}.{module.name}.feature"
            if module.ispkg and find_spec(name) is not None:
                by_name[module.name] = import_module(name).FEATURE
    while incomplete := [
        n for n, feature in by_name.items() if not by_name.keys() >= {*feature.needs}
    ]:
        for name in incomplete:
            del by_name[name]
    return MappingProxyType(dict(sorted(by_name.items())))


@cache
def taking_part() -> tuple[Feature, ...]:
    """All features in the order in which the hooks of a run are called: sorted by name, but each
    behind those that it names in :attr:`Feature.after`."""
    known, ordered = features(), dict[str, Feature]()

    def add(name: str) -> None:
        if name in known and name not in ordered:
            for earlier in known[name].after:
                add(earlier)
            ordered[name] = known[name]

    for name in known:
        add(name)
    return tuple(ordered.values())


@cache
def section_classes() -> Mapping[str, type[FlagSection]]:
    """The flags of all features by the name of their section, in the order of --help."""
    sections = [s for feature in features().values() for s in feature.sections.items()]
    sections.sort(key=lambda section: (not issubclass(section[1], KindConfig), section[0]))
    return MappingProxyType(dict(sections))


def flag_parts(section: str) -> tuple[type[FlagPart], ...]:
    """The flags that features add to a section of the core."""
    of_features = (feature.flag_parts.get(section) for feature in taking_part())
    return tuple(part for part in of_features if part is not None)


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
