"""Facts that the processes of a run compare before it starts: flags, DeepSpeed JSON, code, package
versions, tokenizer and environment variables, followed by data and checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

import megatron
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint
from megatron.config import PART_FLAGS, RunConfig, Settings
from megatron.config.features import features
from megatron.config.flags import flag_of
from megatron.data.build import DataFile
from megatron.engine.deepspeed_json import Json
from megatron.formats.digests import checkpoint_digest, tokenizer_digest
from megatron.parallel.meeting import Facts
from megatron.util.digests import digest

MAY_DIFFER = frozenset(
    {
        "local_rank",  # the launcher sets it for each process
        "data_cache_path",  # a folder on the node, whose content is derived from the data
        "object_storage_cache_path",  # also a folder on the node
        "non_persistent_local_ckpt_dir",  # a folder on the node
        "deepspeed_config",  # may be a copy on each node; its content is compared
    }
)
"""Fields of the configuration that may differ between the processes of a run."""


_VARIABLES = (
    # NCCL's algorithm determines the order of summation. Ranks with different algorithms hang.
    *("NCCL_ALGO", "NCCL_PROTO"),
    # These set the precision and the order of summation in matrix products.
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_F32_DEFAULT"),
    *("CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_SDPA_DEPRIORITIZED"),
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    # These decide whether kernels are compiled.
    *("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
)


_ON_CPUS = ("OMP_NUM_THREADS",)
"""Variables that determine into how many partial sums a CPU splits a reduction."""


def run_facts(config: RunConfig, content: Json, *more: Any) -> Facts:
    """Return the facts that every process of a run must have in common before it starts.
    ``content`` is the completed DeepSpeed JSON, and ``more`` are configurations of a tool."""
    return {
        **_flags(config),
        **{key: value for own in more for key, value in flag_facts(own).items()},
        **dict(_leaves("DeepSpeed JSON: ", content)),
        **program_facts(),
        "the tokenizer's files": tokenizer_digest(config.tokenizer),
    }


def program_facts() -> Facts:
    """Return the digests of the code, the package versions and the environment variables."""
    on_cpu = not torch.cuda.is_available()
    variables = (*_VARIABLES, *(_ON_CPUS if on_cpu else ()))
    return {
        **_code(),
        **{f"the version of {name}": version for name, version in versions().items()},
        **{f"{name} in the environment": os.environ.get(name, "not set") for name in variables},
    }


def flag_facts(config: Any) -> Facts:
    """Return the fields of a dataclass of flags."""
    return {
        flag_of(field): _shown(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in MAY_DIFFER
    }


def given_facts(settings: Settings) -> Facts:
    """Return the flags that the user gave, without defaults."""
    return {
        f"--{name.replace('_', '-')}": _shown(setting.value)
        for name, setting in settings.items()
        if name not in MAY_DIFFER
    }


def data_facts(files: Sequence[DataFile]) -> Facts:
    """Return the data files, in order, with digests of their content."""
    facts = {}
    for number, file in enumerate(files):
        use = f"{file.path}, weight {_shown(file.weight)}, range {_shown(file.share)}"
        facts[f"file {number} of the data ({file.part})"] = use
        for name, value in file.content.items():
            facts[f"{file.path}: {name}"] = str(value)
    return facts


def checkpoint_facts(
    loaded: Sequence[FoundCheckpoint | None], config: RunConfig | None = None
) -> Facts:
    """Return the checkpoints that a run loads, the base models of adapters among them, and further
    checkpoints that the flags of ``config`` name. Raises CheckpointError if one of these is
    damaged, or if the base model of an adapter is missing."""
    bases = [
        one.form.locate_base(one.folder, one.base)  # type: ignore[attr-defined]
        for one in loaded
        if one is not None and one.form.on_base
    ]
    used = {"the checkpoint to load": [*loaded, *bases]}
    if config is not None:
        named = (item for f in features().values() for item in f.checkpoints(config).items())
        used |= {f"the checkpoint of {flag}": [locate_checkpoint(p)] for flag, p in named if p}
    facts = {}
    for name, ones in used.items():
        shown = (f"{one.folder} ({one.form.title})" if one else "none" for one in ones)
        facts[name] = ", ".join(shown)
        for one in filter(None, ones):
            facts[f"the content of {one.folder}"] = checkpoint_digest(one.folder)
    return facts


def _flags(config: RunConfig) -> Facts:
    facts = {}
    for part, values in config.to_dict().items():
        flags = {field.name: field for field in dataclasses.fields(PART_FLAGS[part])}
        for name, value in values.items():
            if name in MAY_DIFFER:
                continue
            field = flags.get(name)
            own = field is not None and not field.metadata.get("internal")
            facts[flag_of(field) if own and field else f"{part}.{name}"] = _shown(value)
    return facts


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "not given"
    return "not given" if value is None else str(value)


def _leaves(where: str, content: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of a JSON tree with their dotted keys."""
    if isinstance(content, Mapping) and content:
        for key, value in content.items():
            inside = where if where.endswith(": ") else f"{where}."
            yield from _leaves(f"{inside}{key}", value)
    else:
        yield where, json.dumps(content)


def _code() -> Facts:
    """Return a digest of every source file of the package, and of the main program."""
    root = os.path.dirname(megatron.__file__)
    start = len(os.path.dirname(root)) + 1
    facts = {}
    for folder, _, files in os.walk(root):  # pathlib would take twice as long
        for name in files:
            if name.endswith(".py"):
                path = f"{folder}/{name}"
                facts[path[start:]] = path
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is not None and os.path.isfile(program):
        facts[os.path.basename(program)] = program
    return {f"the code of {name}": _digest_of(path) for name, path in facts.items()}


def _digest_of(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return digest(file.read())


_PACKAGES = (
    *("deepspeed", "numpy", "safetensors", "triton", "flash-attn", "transformers"),
    *("tokenizers", "sentencepiece", "tiktoken"),
)


def versions() -> dict[str, str]:
    """Return the versions of Python, of CUDA and NCCL, and of the packages that affect results."""
    by_package = {
        "python": platform.python_version(),
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "torch's CUDA": str(torch.version.cuda or torch.version.hip),
    }
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        by_package["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return by_package | {name: _version(name) for name in _PACKAGES}


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
