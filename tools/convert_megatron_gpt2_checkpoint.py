#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Converts a GPT-2 of Megatron-LM to Hugging Face, as the script of transformers up to 4.46 did.

    python tools/convert_megatron_gpt2_checkpoint.py megatron_gpt2_345m_v0_0.zip
    python tools/convert_megatron_gpt2_checkpoint.py megatron-codeparrot-small/model_optim_rng.pt

The model is written into the folder of the file, as safetensors, after its logits were compared
with the checkpoint's. Its tokenizer is that of vocab.json and merges.txt in this folder, or else of
the files that the checkpoint names. tools/convert_checkpoint.py to-hf converts any other format.
"""

import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron.checkpoint.files import read_json
from megatron.config import ConfigError, ModelConfig, TokenizerConfig
from megatron.config.command_line import CommandParser
from megatron.formats.conversion.commands import export_hf
from megatron.formats.conversion.output import need, parse_size, published_into
from megatron.formats.huggingface.layer_norm_decoders import GPT2
from megatron.formats.huggingface.source import TOKENIZER
from megatron.formats.huggingface.weight_files import WeightFiles
from megatron.formats.legacy_megatron.rank_files import MODEL_FILES
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.util.errors import one_line

NAME = "convert_megatron_gpt2_checkpoint.py"
MEMBER = f"release/mp_rank_00/{MODEL_FILES[0]}"
SHARD_BYTES = parse_size("5GB")


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    try:
        convert(
            Path(options.path_to_checkpoint),
            Path(options.config_file) if options.config_file else None,
            options.print_checkpoint_structure,
            options.overwrite,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"{NAME}: error: {one_line(error)}")


def parser() -> CommandParser:
    result = CommandParser(__doc__)
    result.add_argument("path_to_checkpoint", help="zip archive as NVIDIA's, or model_optim_rng.pt")
    result.add_argument(
        "--print-checkpoint-structure", action="store_true", help="print names and shapes written"
    )
    result.add_argument(
        "--config_file", "--config-file", default="", metavar="FILE",
        help="config.json of a GPT-2, for a checkpoint without arguments that is not NVIDIA's",
    )  # fmt: skip
    result.add_argument(
        "--overwrite", action="store_true", help="replace the model in the folder of the file"
    )
    return result


def convert(path: Path, config_file: Path | None, structure: bool, overwrite: bool) -> None:
    """Writes the model and its tokenizer next to the checkpoint ``path``. Raises ConfigError if the
    file or that of the configuration is not one of a GPT-2. Raises CheckpointError if the
    checkpoint is damaged, or the folder has a model. Raises ValueError if no architecture of
    Hugging Face fits."""
    need(NAME, "transformers")
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {why}; give a zip archive or the file {MODEL_FILES[0]}")
    described = None if config_file is None else description(config_file)
    folder = path.parent
    with published_into(folder, overwrite) as written:
        source = MegatronCheckpoint(located(path), described)
        if source.model.family != GPT2.family:
            raise ConfigError(
                f"{path} has a model of the family {source.model.family}, not a GPT-2; "
                "tools/convert_checkpoint.py to-hf converts it"
            )
        if described is not None:
            require_agreement(source, described, f"--config_file {config_file}")
        for note in source.notes:
            print(f"{path}: {note}")
        source.tokenizer = tokenizer_next_to(folder) or source.tokenizer
        result = export_hf(source, written, SHARD_BYTES)
        if structure:
            for line in structure_of(written):
                print(line)
        names = sorted(each.name for each in written.iterdir())
    print(f"{folder}: {result}")
    print(f"wrote {', '.join(names)}")
    for line in next_steps(path, has_tokenizer=not set(TOKENIZER).isdisjoint(names)):
        print(line)


def located(path: Path) -> Path:
    """The checkpoint of a file: with the files of other ranks next to it, or in the archive. Raises
    ConfigError if an archive has none."""
    checkpoint = MegatronCheckpoint.locate(path, None)
    if checkpoint is not None:
        return checkpoint
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
        if not any(name.endswith("data.pkl") for name in members):  # of torch.save
            raise ConfigError(
                f"{path} has no {MEMBER}, nor such a file of an iteration; it has "
                f"{', '.join(members[:4]) or 'nothing'}"
            )
    elif path.suffix == ".zip":
        raise ConfigError(f"{path} is not a zip archive; is its download complete?")
    return path


def description(path: Path) -> ModelConfig:
    """The network of a GPT-2's config.json. Raises ConfigError if it is of another model;
    CheckpointError if it is missing, malformed, or of a network that cannot be represented."""
    content = read_json(path, lenient=True)
    if not isinstance(content, dict) or content.get("model_type", "gpt2") != GPT2.model_type:
        raise ConfigError(f"--config_file {path} is not the config.json of a GPT-2")
    return GPT2.model(content, path)


def require_agreement(source: MegatronCheckpoint, described: ModelConfig, name: str) -> None:
    """Raises ConfigError if a checkpoint's own arguments describe another network."""
    shaping = described.shaping()
    for field, value in source.model.shaping().items():
        if shaping[field] != value:
            raise ConfigError(
                f"{name} has {field} {shaping[field]}, but {source.folder} was trained with "
                f"{value}; the checkpoint describes itself, so leave --config_file out"
            )


def tokenizer_next_to(folder: Path) -> TokenizerConfig | None:
    """The tokenizer of a folder's vocab.json and merges.txt; None without them."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocabulary.is_file() and merges.is_file()):
        return None
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocabulary), merge_file=str(merges)
    )


def structure_of(folder: Path) -> Iterator[str]:
    weights = WeightFiles(folder)
    for name in weights.files:
        yield f"# {name:48} : {torch.Size(weights.shape(name))}"


def next_steps(path: Path, has_tokenizer: bool) -> Iterator[str]:
    folder = path.parent
    if not has_tokenizer:
        yield (
            f"no tokenizer: put the model's vocab.json and merges.txt into {folder}, and give this "
            "command again with --overwrite"
        )
    else:
        yield f"generate: transformers.pipeline('text-generation', model={str(folder)!r})"
    yield (
        f"load: AutoModelForCausalLM.from_pretrained({str(folder)!r}); upload: push_to_hub, or "
        f"hf upload OWNER/NAME {folder} --exclude {path.name}"
    )


if __name__ == "__main__":
    main()
