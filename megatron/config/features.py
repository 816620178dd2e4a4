"""The features: folders next to the core, each of which can add to a run.

A feature is a folder of ``megatron/features`` or ``megatron/apps`` whose ``feature.py`` has a
subclass of :class:`Feature` as ``FEATURE``. No list names them: a folder that is removed is a
feature less, and its flags go with it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, Self

from megatron.config.flags import ConfigResolver, Settings
from megatron.config.memory import LayerMemory

FOLDERS = ("megatron.features", "megatron.apps")
"""Packages that contain features. This is the only place of the core that names them."""

AHEAD = "mtp."
"""Beginning of the canonical names of blocks that predict further tokens."""

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


class Feature:
    """Hooks by which a folder adds to a run.

    Hooks have defaults that add nothing. They import the folder's other modules when they are
    called, so that a run pays for the features that it uses.

    Attributes:
        needs: names of features whose modules this one imports.
        sections: the class of flags of each section of a saved configuration.
        model_parts: classes of flags of the network.
        families: names of the model families that :meth:`family` returns.
        tokenizers: values of ``--tokenizer-type`` that :meth:`tokenizer` returns.
        only_trained: how the canonical names of parameters begin that only training uses, and
            which models written for other programs leave out.
        optimizers: values of ``--optimizer`` that :meth:`optimizer` returns, with the names of the
            states of a parameter.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[Mapping[str, type[FlagSection]]] = {}
    model_parts: ClassVar[tuple[type[ModelPart], ...]] = ()
    families: ClassVar[tuple[str, ...]] = ()
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
        """The :class:`~megatron.engine.update.groups.Factors` of learning rate, decay and epsilon
        of every parameter that is trained, by canonical ``names`` and the ``rules`` of an optimizer
        of features; empty, on all ranks, for none."""
        return {}

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

    def check_run(self, run: Any, mesh: Any, device: Any) -> None:
        """Raise ConfigError for a run, of training or evaluation, before its data are read."""

    def check_source(self, config: Any, source: Any) -> None:
        """Raise ConfigError where a run cannot start from the
        :class:`~megatron.training.resume_source.ResumeSource` that its flags name, or None."""

    def begin(self, context: Any) -> None:
        """Called with the :class:`~megatron.training.context.RunContext` before data are read."""

    def before_engine(self, context: Any) -> None:
        """Called when data, plan and source of the context exist."""

    def before_load(self, context: Any) -> None:
        """Called when its engine exists; may replace ``context.source``."""

    def ready(self, context: Any) -> None:
        """Called when everything in the context exists, to add callbacks to it."""

    def answer_ends(self, train: Any, tokenizer: Any, of_base: Sequence[int]) -> Any:
        """The tokens at which the examples of a data set end answers, a frozenset; ``of_base``:
        those of the model that training starts from. None where the feature cannot tell."""
        return None

    def extent(self, config: Any, plan: Any, sizes: Callable[[], Sequence[Any]]) -> Sequence[str]:
        """Lines at the start of a run about how much it trains; ``sizes``: of its data files."""
        return ()

    def missing_evaluation(self, config: Any, kinds: Sequence[str]) -> str | None:
        """An evaluation after the last step that is not among the ``kinds`` of rows in the metrics;
        None if all are there."""
        return None

    def writers(
        self, logging: Any, configuration: Mapping[str, Any], iteration: int, samples: int
    ) -> Sequence[Any]:
        """Each :class:`~megatron.training.writers.RunWriter` of the main process for metrics, next
        to the JSON lines; ``iteration`` and ``samples`` are those before its first row."""
        return ()


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
