"""Installs the package, the training commands and the tools."""

from setuptools import find_packages, setup

# torch and deepspeed are held to the range that the tests ran with: both change their behaviour
# between minor releases.
REQUIRES = [
    "torch>=2.11,<2.14",
    "deepspeed>=0.19.8,<0.20",
    "filelock",
    "matplotlib",
    "nltk",
    "numpy>=1.26",
    "orjson",
    "safetensors>=0.4",
    "tensorboard",
    "tiktoken",
    "tokenizers>=0.20",
    "transformers>=4.46",
    "zstandard",
]

EXTRAS = {
    "numba": ["numba"],
    "wandb": ["wandb"],
    "test": ["hypothesis", "mypy", "numba", "pytest>=8", "pytest-xdist", "ruff"],
}

COMMANDS = [
    "megatron-pretrain-gpt = pretrain_gpt:main",
    "megatron-train-tokenizer = megatron.tools.train_tokenizer:main",
    "megatron-preprocess-data = megatron.tools.preprocess_data:main",
    "megatron-convert-checkpoint = megatron.tools.convert_checkpoint:main",
    "megatron-inspect-checkpoint = megatron.tools.inspect_checkpoint:main",
    "megatron-verify-checkpoint = megatron.tools.verify_checkpoint:main",
    "megatron-generate = megatron.tools.generate:main",
    "megatron-layouts = megatron.tools.layouts:main",
    "megatron-schedule = megatron.tools.schedule:main",
    "megatron-plan = megatron.tools.plan:main",
    "megatron-check-parity = megatron.tools.check_parity:main",
]

setup(
    name="megatron-deepspeed",
    version="0.1.0",
    description="Megatron's layers, data and model code, trained by DeepSpeed's engine",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # The scripts in tools/ run as they lie; the installed commands find them as megatron.tools.
    packages=[*find_packages(include=["megatron", "megatron.*"]), "megatron.tools"],
    package_dir={"megatron.tools": "tools"},
    py_modules=["pretrain_gpt"],
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": COMMANDS},
)
