"""Outputs of a conversion: a folder that is either complete or absent, a checkpoint in this
project's format, or a repository on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import complete_tags, replace_folder, tag
from megatron.checkpoint.manifest import CONFIG, STATE
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import Source
from megatron.checkpoint.writer import SliceWriter, finish_checkpoint
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    PrecisionConfig,
    RunConfig,
    TokenizerConfig,
)
from megatron.util.files import sync_path
from megatron.util.progress import progress_bar

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MODEL_FILE = re.compile(
    r"(generation_)?config\.json"
    r"|(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
"""Names of the files that transformers reads as a model, without those of the tokenizer."""
_MODEL_MARKS = ("generation_config.json", "model.safetensors", "model.safetensors.index.json")


@contextmanager
def published(
    output: Path, overwrite: bool, source: Path, marks: Collection[str] = _MODEL_MARKS
) -> Iterator[Path]:
    """Yield a temporary folder, which replaces ``output`` when the block ends without an error.
    An ``output`` that is not empty is only replaced with ``overwrite``, and if it has one of the
    files ``marks``, which identify an earlier result. It must not contain ``source`` or be inside
    it. Raises CheckpointError if ``output`` must not be replaced, or cannot be written."""
    output = output.resolve()
    _check(output, overwrite, source.resolve(), marks)
    with _unfinished(output, f"--output {output}") as temporary:
        yield temporary
        replace_folder(temporary, output, {})


@contextmanager
def published_into(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder inside ``folder``. When the block ends without an error, its files
    are moved to ``folder``, config.json last; other files there are kept. Raises CheckpointError if
    ``folder`` has a model that must not be overwritten, or cannot be written."""
    old = sorted(path for path in folder.iterdir() if _MODEL_FILE.fullmatch(path.name))
    if old and not overwrite:
        raise CheckpointError(
            f"{folder} has a model already ({', '.join(path.name for path in old[:4])}); give "
            "--overwrite to replace it, or move it away"
        )
    with _unfinished(folder / "converted", f"{folder}") as temporary:
        yield temporary
        for path in old:
            path.unlink()
        written = sorted(temporary.iterdir(), key=lambda path: path.name == "config.json")
        for path in written:
            os.replace(path, folder / path.name)
        sync_path(folder)
        temporary.rmdir()


@contextmanager
def _unfinished(final: Path, name: str) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(unfinished_folder(final))
        except OSError as error:
            raise CheckpointError(f"{name}: cannot write there: {error}") from None
        yield temporary


def _check(output: Path, overwrite: bool, source: Path, marks: Collection[str]) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise CheckpointError(f"--output {output} is a file; name a folder")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"--output {output} is not empty; give --overwrite to replace it or name another folder"
        )
    if source.is_relative_to(output) or output.is_relative_to(source):
        raise CheckpointError(f"--output {output} and the checkpoint {source} contain each other")
    if not any((output / mark).is_file() for mark in marks):
        raise CheckpointError(
            f"--output {output} is not a converted model (it has no {' or '.join(marks)}), so "
            "--overwrite does not replace it; name another folder"
        )


def need(command: str, package: str) -> None:
    """Raise ConfigError if the package that a command requires is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{command} needs {package}: pip install {package.replace('_', '-')}")


def parse_size(text: str) -> int:
    """Convert a size such as 5GB (10^9) or 4GiB (2^30) to bytes. Raises ConfigError if it is
    malformed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or "B"]) if match and match[2] != "IB" else 0
    if size < 1:
        raise ConfigError(
            f"--max-shard-size {text} is not a size; write 500MB, 5GB or 4GiB, or a number of bytes"
        )
    return size


def check_hub(repository: str) -> None:
    """Raise ConfigError if the hub's client is not installed, or the repository name is invalid."""
    need("--push-to-hub", "huggingface_hub")
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {repository}: {_line(error)}") from None


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload a folder's files to a repository in one commit, and return its URL. The repository
    (``owner/name``, or ``name`` for the user's own) is created if it does not exist. Raises OSError
    if the hub cannot be reached or refuses, or if ``private`` is set and an existing repository is
    public."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    flag = " --private" if private else ""

    def refused(error: Exception) -> OSError:
        why = _line(error)
        if isinstance(error, HfHubHTTPError):
            status = getattr(error.response, "status_code", None)
            hint = "; log in with `hf auth login` or set HF_TOKEN" if status in (401, 403) else ""
            why = f"status {status}: {why}{hint}"
        return OSError(
            f"--push-to-hub {repository}: {api.endpoint}: {why}. The model is complete in "
            f"{folder}; `hf upload {repository} {folder}{flag}` uploads it"
        )

    try:
        url = api.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        # create_repo does not change the visibility of an existing repository.
        is_open = private and not api.model_info(url.repo_id).private
        if not is_open:
            api.upload_folder(
                repo_id=url.repo_id,
                folder_path=folder,
                repo_type="model",
                commit_message="Upload model",
            )
            return str(url)
    except Exception as error:  # errors of the client's HTTP library vary between versions
        raise refused(error) from None
    raise OSError(
        f"--push-to-hub {repository}: the repository exists and is public, so nothing was "
        f"uploaded; give --public if everybody may read the model, or name another repository. "
        f"The model is complete in {folder}"
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else f"{text[:300]}...").rstrip(".")


@contextmanager
def unfinished_folder(final: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to ``final``. The block must write to it and end with
    :func:`publish` or :func:`replace_folder`. If the block fails, the folder is removed."""
    folder = final.with_name(f".{final.name}.incomplete")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:  # including an interrupt: leave no partial model behind
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_checkpoint(
    save: Path,
    source: Source,
    iteration: int | None = None,
    moments: bool = True,
    max_file_bytes: int = 5 * 10**9,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write any checkpoint in this project's format, parameter by parameter, and return its folder.

    By default the iteration is the source's, or 0. ``moments`` selects whether optimizer state is
    written too. For ``max_file_bytes`` and ``progress`` see :class:`SliceWriter`. Raises
    CheckpointError if the source is damaged or cannot be used as a model, or if ``save`` already
    contains checkpoints. Raises OSError if a file cannot be written. Nothing is left behind after
    an error.
    """
    source.require_model()
    if save.is_dir() and (known := complete_tags(save)):
        raise CheckpointError(
            f"{save} contains {known[-1]}, which would no longer be the newest: name another folder"
        )
    if iteration is None:
        iteration = source.state.get("iteration", 0)
    with unfinished_folder(save / tag(iteration)) as folder:
        writer = SliceWriter(folder, 0, max_file_bytes, progress)
        for name in progress_bar("writing", source.names(), unit=" parameters"):
            kinds = [kind for kind in source.kinds(name) if moments or kind == "weight"]
            tensors = ((kind, source.tensor(name, kind)) for kind in kinds)
            writer.add(name, Slice.whole(source.shape(name)), tensors)
        writer.finish()
        state = {key: value for key, value in source.state.items() if key != "world_size"}
        contents = {
            CONFIG: run_of(source, moments).to_dict(),
            STATE: state | ({"iteration": iteration} if state else {}),
        }
        finish_checkpoint(save, iteration, 1, contents, source.copy_tokenizer)
    return save / tag(iteration)


def run_of(source: Source, moments: bool = True) -> RunConfig:
    """Return the configuration to save with a converted checkpoint: that of the source's run, as
    far as it is known."""
    run = source.run
    if run is None:
        # makes a later export use the dtype in which the source is stored
        dtype = source.dtype(source.names()[0])
        run = RunConfig(
            source.model,
            tokenizer=source.tokenizer or TokenizerConfig(),
            precision=PrecisionConfig(bf16=dtype == "bfloat16", fp16=dtype == "float16"),
        )
    checkpoint = dataclasses.replace(
        run.checkpoint, save_optim=run.checkpoint.save_optim and moments
    )
    if source.run is None:
        checkpoint = CheckpointConfig(save_optim=moments)
    run = dataclasses.replace(run, model=source.model, checkpoint=checkpoint)
    return run.with_vocabulary(source.model.vocabulary.size)
