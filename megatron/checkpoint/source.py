"""Checkpoints of any format, read as whole parameters with canonical names.

A format is defined by a :class:`Source` and by a :class:`Format`, which imports it when used.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.folder import MEGATRON_TRACKER, TRACKER
from megatron.checkpoint.slices import Slice
from megatron.config import ConfigError, ModelConfig, ModelFlags, RunConfig, TokenizerConfig
from megatron.config.features import features
from megatron.util.files import MOST_BYTES, own_file
from megatron.util.progress import progress_bar

TOKENIZER = "tokenizer"
"""Subfolder of this project's checkpoints that contains the tokenizer's files."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "spm_char.model", "source.spm",
    "target.spm", "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json",
    "normalizer.json", "prophetnet.tokenizer", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "word_pronunciation.json", "word_shape.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files that transformers' tokenizers may have, and the generation settings."""


class Source(ABC):
    """Checkpoint opened for reading. Each format has its own subclass.

    Attributes:
        title: the format's name in messages.
        tokenizer: configuration of the tokenizer. None if the checkpoint does not describe it.
        run: configuration of the run that wrote it. None if the checkpoint does not contain it.
        state: ``iteration``, ``consumed_samples``, ``optimizer_step``, ``loss_scaler``. Empty if
          the checkpoint contains only weights; training then starts at iteration 0.
        notes: messages about choices that the checkpoint does not determine.
        refusal: reason why the checkpoint cannot be used as a model. None if it can.
        end_of_text: id of the token that ends a document, if known without the tokenizer's
          files. Otherwise None.
        on_base: whether the format contains adapters of another model. The constructor and
          ``verify`` then accept the path of that model as ``base``.
        base: for a model merged with adapters, the model without them. Otherwise None.
        additions: for a model merged with adapters, the adapters alone. Otherwise None.
    """

    title: ClassVar[str]
    on_base: ClassVar[bool] = False
    folder: Path
    model: ModelConfig
    tokenizer: TokenizerConfig | None = None
    run: RunConfig | None = None
    state: dict[str, Any]
    notes: Sequence[str] = ()
    refusal: str | None = None
    end_of_text: int | None = None
    base: Source | None = None
    additions: Source | None = None

    @classmethod
    @abstractmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """Return the path of a checkpoint of this format, or None if ``path`` has none. ``path`` is
        a checkpoint or a folder with a tracker. ``wanted`` is a tag or iteration, or None for the
        newest. Raises CheckpointError if there are checkpoints, but not the wanted one."""

    @classmethod
    def family(cls, folder: Path) -> str:
        """Return the model family of a checkpoint that was located. Weights are not read."""
        return ModelConfig.family

    def __init__(self, folder: Path) -> None:
        """Open the path that :meth:`locate` returned. Raises CheckpointError if a file is missing
        or malformed, or the network is not supported."""
        self.folder, self.state = folder, {}

    def require_model(self) -> None:
        """Raise CheckpointError if the checkpoint can only be inspected, not used as a model."""
        if self.refusal is not None:
            raise CheckpointError(f"{self.folder}: {self.refusal}")

    def read_ahead(self) -> None:  # noqa: B027
        """Include the blocks for multi-token prediction in the model, which are left out by
        default. Has no effect if the checkpoint has none."""

    def read_as_weights(self, kind: str) -> None:
        """Use the tensors of another kind, such as an average, as the weight of each parameter. All
        other kinds are then ignored. Raises CheckpointError if the checkpoint does not have it."""
        raise CheckpointError(
            f"{self.folder} has no {kind}: only the {reader('native').title} of a run with "
            "--ema-decay or --swa-start-iter has averages of weights"
        )

    @classmethod  # noqa: B027
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        """Compare the files with their checksums, if the format has them. Ranks can divide the
        work: each checks every ``shares``-th file, starting with ``share``. Raises CheckpointError
        if a file is missing or damaged."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return the canonical names of the parameters, in layer order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole parameter, without padding."""

    @abstractmethod
    def kinds(self, name: str) -> Sequence[str]:
        """Return the kinds of a parameter's tensors: ``weight`` and moments (``exp_avg``, ...)."""

    def dtype(self, name: str, kind: str = "weight") -> str:
        """Return the name, in torch, of the dtype in which a tensor is stored."""
        return "float32"

    @abstractmethod
    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """Return a whole parameter or one of its moments, without padding, as float32 on the CPU.
        Raises CheckpointError if it is missing or malformed."""

    def read(self, name: str, kind: str, wanted: Slice) -> Tensor:
        """Return a slice of a parameter or moment, flat, as float32. Raises the errors of
        :meth:`tensor`. Formats that can read a slice without the whole tensor override this."""
        whole = self.tensor(name, kind)
        if tuple(whole.shape) != wanted.shape:
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} has the shape {tuple(whole.shape)}, the model "
                f"needs {wanted.shape}"
            )
        return wanted.cut(whole)

    def check_tensors(self) -> None:
        """Read every tensor. Raises CheckpointError if one is missing or malformed."""
        for name in progress_bar("reading", self.names(), unit=" parameters"):
            for kind in self.kinds(name):
                self.tensor(name, kind)

    @property
    def generation(self) -> dict[str, Any]:
        """Generation settings and end-of-text tokens, with the keys of ``generation_config.json``.
        Empty if unknown. Raises CheckpointError if the file is malformed."""
        read = _of_others("read_generation", lambda folder, rows: {})
        settings: dict[str, Any] = read(self.folder / TOKENIZER, self.model.vocabulary.size)
        return settings

    def copy_tokenizer(self, target: Path) -> bool:
        """Copy the tokenizer's files, in Hugging Face's format, and :attr:`generation` to a new
        folder, which is created only if there is something to copy. Return whether there is a
        tokenizer. Raises CheckpointError if a file is a symbolic link that leaves the folder."""
        own = self.folder / TOKENIZER
        if own.is_symlink():
            raise CheckpointError(f"{own} is a link, not the folder of the checkpoint's tokenizer")
        if own.is_dir():
            copy_tokenizer_files(own, target)
        return tokenizer_in(self.folder) is not None


def tokenizer_in(folder: Path) -> Path | None:
    """Return the tokenizer's folder in a checkpoint of this project, or None if it has none."""
    own = folder / TOKENIZER
    names = [name for name in TOKENIZER_FILES if (own / name).is_file()]
    return own if names and names != ["generation_config.json"] else None


def copy_tokenizer_files(folder: Path, target: Path) -> None:
    """Copy a tokenizer's files with known names, and generation_config.json, to a new folder.
    Raises CheckpointError if one is a symbolic link that leaves the folder: otherwise a private
    file could be copied, and published with an upload."""
    target.mkdir()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            try:
                source_file = own_file(folder / name)
            except ValueError as error:
                raise CheckpointError(str(error)) from None
            if source_file.stat().st_size > MOST_BYTES:
                raise CheckpointError(
                    f"{folder / name} has more than {MOST_BYTES:,} bytes: no tokenizer has"
                )
            shutil.copyfile(source_file, target / name, follow_symlinks=False)
            if name.startswith("generation_config"):  # transformers' parser sets no limits
                settings = read_json(source_file, lenient=True)
                if isinstance(settings, dict) and settings.pop("_name_or_path", None) is not None:
                    write_json(target / name, settings)  # without a path on this machine


def resolved(flags: ModelFlags, where: Path) -> ModelConfig:
    """Return the model configuration that ``flags`` describe, as read from the file ``where`` of
    another program's checkpoint. Raises CheckpointError if it is not supported."""
    try:
        return flags.resolve()
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


class Format(NamedTuple):
    """Checkpoint format, whose modules are imported only when they are used.

    Attributes:
        reader: imports the format's :class:`Source`.
        writer: imports a function that writes a copy in the format; see :func:`save_copy`.
        saver: imports the :class:`~megatron.engine.saving.CheckpointWriter` with which training
          saves if ``--checkpoint-format`` is the format's name.
        needs: packages that the format requires. Without them it is left out.
        after: name of the format that is tried directly before this one. If it is missing, a
          feature's format is left out too.
    """

    name: str
    reader: Callable[[], type[Source]]
    writer: Callable[[], Callable[[Source, Path, int], Path]] | None = None
    saver: Callable[[], type[Any]] | None = None
    needs: tuple[str, ...] = ()
    after: str = "native"


NATIVE = Format("native", partial(resolve_name, "megatron.checkpoint.reader:CheckpointReader"))
OTHERS = "megatron.formats"
"""Package with other programs' formats. Without it, only this project's format can be read."""


def _of_others(name: str, otherwise: Any) -> Any:
    """Return an object from the package of other formats, or ``otherwise`` if it is missing."""
    try:
        return resolve_name(f"{OTHERS}:{name}")
    except ModuleNotFoundError as error:
        if error.name != OTHERS:
            raise
        return otherwise


@cache
def formats() -> dict[str, Format]:
    """Return all formats by name, in the order in which a path is tried with them."""
    ordered = [NATIVE, *_of_others("FORMATS", ())]
    for feature in features().values():
        for form in feature.formats():
            names = [each.name for each in ordered]
            if form.after in names:
                ordered.insert(names.index(form.after) + 1, form)
    return {form.name: form for form in ordered}


def reader(name: str) -> type[Source]:
    """Return the class that reads checkpoints in the format ``name``."""
    return formats()[name].reader()


def saver_of(name: str) -> type[Any]:
    """Return the class with which training saves checkpoints in the format ``name``."""
    saver = formats()[name].saver
    assert saver is not None
    return saver()


def save_copy(name: str, source: Source, save: Path, stage: int) -> Path:
    """Write a copy of a checkpoint in the format ``name`` into the folder ``save``, for runs with
    ZeRO ``stage``, and return its path. Raises CheckpointError if the source is damaged, or OSError
    if a file cannot be written. Nothing is left behind on failure."""
    writer = formats()[name].writer
    assert writer is not None
    return writer()(source, save, stage)


class FoundCheckpoint(NamedTuple):
    """Checkpoint that was located but not opened. ``base`` is the path of the adapters' base model,
    if it differs from the recorded one. ``weights`` is the kind of tensor to read as weights."""

    form: type[Source]
    folder: Path
    base: str | None = None
    weights: str = "weight"

    def open(self, verify: bool = True) -> Source:
        """Open the checkpoint, by default after verifying its files' checksums. Raises
        CheckpointError if it is damaged or not supported."""
        if verify:
            self.verify()
        source = self.form(self.folder, **self._options)
        if self.weights != "weight":
            source.read_as_weights(self.weights)
        return source

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Verify this rank's share of the checkpoint's files as :meth:`Source.verify` does."""
        self.form.verify(self.folder, share, shares, **self._options)

    @property
    def family(self) -> str:
        """Model family of the checkpoint, as :meth:`Source.family` returns it."""
        return self.form.family(self.folder, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"base": self.base} if self.base is not None and self.form.on_base else {}


def locate_checkpoint(
    load: str | Path, wanted: str | None = None, prefer: str = "native", *, others: bool = False
) -> FoundCheckpoint | None:
    """Find a checkpoint of any format, trying ``prefer`` first. ``wanted`` is a tag or iteration,
    or None for the newest. Return None if the folder is missing or has neither checkpoints nor
    trackers. Raises CheckpointError if the wanted checkpoint, or the tracker's, does not exist, or,
    unless ``others`` is set, if there are weights in a form that cannot be read."""
    path, refusal = Path(load), None
    tracker = path / TRACKER
    empty = _is_empty(path)
    for form in () if empty else _tried(prefer):
        try:
            folder = form.locate(path, wanted)
        except CheckpointError as error:
            # The folder may contain several formats. The wanted checkpoint may be in another one.
            refusal = refusal or error
            if wanted is None and tracker.is_file():
                wanted = tracker.read_text(errors="replace").strip()
            continue
        if folder is not None:
            return FoundCheckpoint(form, folder)
    if refusal is not None:
        raise refusal
    if not empty and not others:
        content = _of_others("unread_content", lambda path: None)(path)
        if content is not None:
            raise CheckpointError(f"{path} {'is' if path.is_file() else 'has'} {content}")
    if wanted is not None:
        raise CheckpointError(f"{path} has no complete checkpoint {wanted}")
    for tracker in (path / TRACKER, path / MEGATRON_TRACKER):
        if tracker.is_file():
            named = tracker.read_text(errors="replace").strip()
            raise CheckpointError(
                f"{tracker} names {named!r}, but {path} has no complete checkpoint of a known "
                f"format: {', '.join(form.title for form in _tried(prefer))}"
            )
    if path.is_file():
        raise CheckpointError(f"{path} is a file, not a checkpoint of a known format")
    return None


def _tried(prefer: str) -> Iterator[type[Source]]:
    """Yield the source classes of all formats, beginning with ``prefer``. As long as the native
    format is preferred and suffices, the package of other formats is not imported."""
    if prefer == NATIVE.name:
        yield NATIVE.reader()
    names = [name for name in formats() if (name, prefer) != (NATIVE.name, NATIVE.name)]
    yield from map(reader, sorted(names, key=lambda name: name != prefer))


def _is_empty(path: Path) -> bool:
    """Return whether a path is missing or empty. If so, a run from scratch imports no format."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def nothing_at(path: str | Path) -> str:
    """Return the reason, for a message, why :func:`locate_checkpoint` found no checkpoint."""
    return "no complete checkpoint found" if Path(path).exists() else "no such folder"


def open_checkpoint(load: str | Path, wanted: str | None = None, verify: bool = True) -> Source:
    """Find a checkpoint with :func:`locate_checkpoint` and open it. Raises CheckpointError if it
    does not exist or is damaged."""
    checkpoint = locate_checkpoint(load, wanted)
    if checkpoint is None:
        raise CheckpointError(f"{load}: {nothing_at(load)}")
    return checkpoint.open(verify)
