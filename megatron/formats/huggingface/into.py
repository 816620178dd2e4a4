"""Export of a text model into the multimodal model from which it was read. Its tensors are replaced
in a copy of the folder; everything else is copied unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.tensors import finite, save_tensors
from megatron.util.files import own_file, sync_path
from megatron.util.progress import progress_bar

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Suffixes of weight files, which are not copied because they contain the old weights."""
_TRAINING = ("dropout", "init", "pdrop", "aux_loss", "jitter")
"""Substrings of keys that do not affect what a trained model computes."""


def write_into(
    source: Source, origin: Path, folder: Path, progress: Callable[[str], None] = lambda line: None
) -> HuggingFaceFolder:
    """Write a checkpoint's weights into a copy of the folder ``origin``, in the dtypes of its
    tensors and with one file at a time in memory. ``folder`` must be new and empty. Return the
    model in ``origin``. Raises CheckpointError if its text model is a different network, or if its
    files are not unquantised safetensors. Raises OSError if a file cannot be written."""
    home = HuggingFaceFolder(origin)
    _check(source.model, home)
    whole = _Parts(source, home)
    kept = 0
    for path in home.weight_files:
        tensors = dict[str, Tensor]()
        with safe_open(path, framework="pt") as handle:
            names = list(handle.keys())
            for name in progress_bar(f"writing {path.name}", names, unit=" tensors"):
                old = handle.get_tensor(name)
                new = whole.replacing(name, old)
                kept += new is None
                tensors[name] = old if new is None else new
            save_tensors(tensors, folder / path.name, handle.metadata())
        sync_path(folder / path.name)
    missing = {*source.names()} - whole.written
    if missing:
        raise CheckpointError(
            f"--origin {origin} has no tensors for {', '.join(sorted(missing)[:5])}"
        )
    for path in sorted(origin.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS:
            try:
                shutil.copyfile(own_file(path), folder / path.name, follow_symlinks=False)
            except ValueError as error:
                raise CheckpointError(str(error)) from None
    sync_path(folder)
    progress(f"{len(whole.written)} parameters replaced, {kept} tensors of other parts copied")
    return home


def _check(model: ModelConfig, home: HuggingFaceFolder) -> None:
    form, where = home.architecture, f"--origin {home.folder}"
    if needs := form.misfits(model):
        raise CheckpointError(f"{where} is {form.title}, which needs {', '.join(needs)}")
    there, here = form.config(home.model), form.config(model)
    others = [
        f"{key} {there[key]!r:.60} (the checkpoint has {here[key]!r:.60})"
        for key in there
        if there[key] != here[key] and not any(part in key for part in _TRAINING)
    ]
    if others:
        raise CheckpointError(f"{where} is another network: {', '.join(others)}")
    if home.weight_files[0].suffix != ".safetensors" or not home.is_plain:
        raise CheckpointError(
            f"{where}: only safetensors that are not quantised are written; load and save it by "
            "transformers first, model.save_pretrained(...)"
        )


class _Parts:
    """A checkpoint's parameters as replacements for a folder's tensors, with one parameter in
    memory at a time. ``written`` has the names of the parameters that were requested."""

    def __init__(self, source: Source, home: HuggingFaceFolder) -> None:
        self._source, self._home, self._places = source, home, home.places()
        tensors = {place[0].ours: name for name, place in reversed(self._places.items())}
        copies = home.architecture.copies(home.model)
        self._copies = {name: tensors[ours] for name, ours in copies.items()}
        self.written = set[str]()
        self._last = ("", dict[str, Tensor]())

    def replacing(self, name: str, old: Tensor) -> Tensor | None:
        """Return the new tensor for a name in the files, in the dtype of ``old``. Return None for
        tensors that are not in the text model."""
        renamed = self._home.renamed
        alone = name if renamed is None else renamed(name)
        if alone not in self._places:
            alone = self._copies.get(alone or "")
        if alone is None:
            return None
        parameter, theirs = self._places[alone]
        if self._last[0] != parameter.ours:
            values = self._source.tensor(parameter.ours)
            self._last = parameter.ours, parameter.to_hf(values)
            self.written.add(parameter.ours)
        return finite(parameter.ours, self._last[1][theirs], old.dtype, self._source.folder).clone()
