"""Export of a fine-tuned model as a Hugging Face folder. The folder's chat template and end tokens
let users prompt the model in the format of the training examples."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.apps.finetune.provenance import TuningRecord, run_of
from megatron.apps.finetune.settings import CHECKPOINTS, TuningConfig
from megatron.apps.finetune.summary import TuningSummary, model_card
from megatron.apps.reinforcement.data.prompts import read_prompts
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.folder import BEST, replace_folder
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint
from megatron.config import ConfigError
from megatron.config.output import check_output
from megatron.data.sources import parts_of
from megatron.features.adapters.checkpoint import AdaptedSource
from megatron.features.adapters.peft import write_peft
from megatron.features.instruction.chat_process import read_template
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import ALPACA_PREAMBLE, read_examples
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import example_files
from megatron.features.keep_best.flags import KeepBestFlags
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.records import read_preferences
from megatron.formats.conversion.commands import export_hf
from megatron.formats.conversion.output import parse_size, published_into, unfinished_folder
from megatron.formats.generation_settings import ends_of, with_ends
from megatron.run.run import Run
from megatron.util.progress import say

REPORT = "report.html"
EXPORTED = "exported.json"
"""JSON file in the checkpoint folder that records which checkpoint was exported, and how."""
ADAPTER = "adapter"
"""Subfolder of --output for the adapters."""
_ALPACA = """\
{%- set state = namespace(text='', first=true) -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- BEGIN + state.text + '### Response:\\n' + message['content'] + eos_token -}}
{%- set state.text = '' -%}{%- set state.first = false -%}
{%- elif message['role'] == 'system' -%}
{%- set state.text = state.text + message['content'] + '\\n\\n' -%}
{%- else -%}
{%- if state.first and not state.text -%}{%- set state.text = 'PREAMBLE\\n\\n' -%}{%- endif -%}
{%- set heading = 'Instruction' if message['role'] == 'user' else message['role'] | capitalize -%}
{%- set state.text = state.text + '### ' + heading + ':\\n' + message['content'] + '\\n\\n' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- BEGIN + state.text + '### Response:\\n' -}}{%- endif -%}
"""
_PLAIN = """\
{%- set state = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- BEGIN + state.text + message['content'] + eos_token -}}{%- set state.text = '' -%}
{%- else -%}{%- set state.text = state.text + message['content'] + '\\n' -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- BEGIN + state.text -}}{%- endif -%}
"""


def check_output_folder(config: TuningConfig) -> None:
    """Check the output folder. Raises ConfigError if the result could not be written to it later,
    or would replace a model that this command did not write."""
    assert config.output is not None
    output = Path(config.output)
    parse_size(config.max_shard_size)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; name a folder")
    check_output("--output", output / REPORT)
    if config.overwrite or not (output / "config.json").is_file():
        return
    if locate_checkpoint(output / CHECKPOINTS) is None:
        raise ConfigError(
            f"--output {output} has a model that no checkpoint in {output / CHECKPOINTS} has made; "
            "name another folder, or give --overwrite to replace it"
        )


def export_model(
    config: TuningConfig, run: Run, summary: TuningSummary, ends: frozenset[int]
) -> None:
    """Export a checkpoint as a model to ``--output``, verified to give the same logits in
    transformers. The model card describes the checkpoint's record, or ``summary`` if it has none.
    Raises ValueError or OSError if no architecture fits or the folder cannot be written."""
    assert config.model is not None and config.output is not None
    output, checkpoint = Path(config.output), exported_checkpoint(run)
    size, result, names = parse_size(config.max_shard_size), None, list[str]()
    source = checkpoint.open()
    try:
        if isinstance(source, AdaptedSource):
            _export_adapters(source, output / ADAPTER, config.model, run)
        if config.merge_adapters or not isinstance(source, AdaptedSource):
            with published_into(output, overwrite=True) as folder:
                result = export_hf(source, folder, size, name=f"--output {output}")
                has_template = write_chat_format(folder, run, ends)
                card = model_card(done_in(source, summary), output.resolve().name, has_template)
                (folder / "README.md").write_text(card, "utf-8")
                names = sorted(path.name for path in folder.iterdir())
        write_json(
            checkpoint.folder.parent / EXPORTED, _export_note(config, checkpoint.folder, names)
        )
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{error}. The training is complete in {checkpoint.folder}: mend that and give "
            "the same command again, which then only writes the model"
        ) from error
    if result is not None:
        say(f"{output}: {result}")


def _export_adapters(source: AdaptedSource, folder: Path, base: str, run: Run) -> None:
    """Write a checkpoint's adapters in peft's format, for the base model ``base``."""
    with unfinished_folder(folder.resolve()) as temporary:
        tensors = write_peft(source, temporary, str(Path(base).resolve()))
        run.tokenizer.save_pretrained(temporary)
        replace_folder(temporary, folder.resolve(), {})
    say(f"{folder}: {tensors} tensors of adapters")


def exported_checkpoint(run: Run) -> FoundCheckpoint:
    """Return the checkpoint to export: the newest or, with ``--keep-best``, that of the best
    evaluation. Raises CheckpointError if no checkpoint exists."""
    checkpoints = Path(run.config.checkpoint.save or "")
    has_best = KeepBestFlags.of(run.config.checkpoint).keep_best and (checkpoints / BEST).is_file()
    best = read_json(checkpoints / BEST)["checkpoint"] if has_best else None
    checkpoint = locate_checkpoint(str(checkpoints), best)
    if checkpoint is None:
        raise CheckpointError(f"{checkpoints}: no complete checkpoint found")
    return checkpoint


def done_in(source: Source, summary: TuningSummary) -> TuningSummary:
    """Return a summary of the work up to a checkpoint, using the checkpoint's own record if any."""
    steps = int(source.state.get("iteration", summary.steps))
    return dataclasses.replace(
        summary,
        config=run_of(source) or summary.config,
        record=TuningRecord.of(source) or summary.record,
        steps=steps,
        rows=[row for row in summary.rows if row["iteration"] <= steps],
    )


def is_exported(config: TuningConfig, run: Run) -> bool:
    """Return whether the model in ``--output`` is complete, and was exported with the same flags
    from the checkpoint that would be exported."""
    checkpoint = exported_checkpoint(run)
    path = checkpoint.folder.parent / EXPORTED
    if not path.is_file():
        return False
    output, content = Path(config.output or ""), read_json(path)
    files = [output / name for name in content.get("files", ())]
    if isinstance(checkpoint.open(verify=False), AdaptedSource):
        files.append(output / ADAPTER / "adapter_model.safetensors")
    same = content | {"files": None} == _export_note(config, checkpoint.folder, None)
    return same and all(file.is_file() for file in files)


def _export_note(config: TuningConfig, folder: Path, files: list[str] | None) -> dict[str, Any]:
    how = {"max_shard_size": config.max_shard_size, "merged": config.merge_adapters}
    return {"checkpoint": folder.name, **how, "files": files}


def template_of(run: Run) -> str | None:
    """Return the chat template that formats conversations as in training. It is that of
    ``--chat-template``, the tokenizer's, or the equivalent of ``--prompt-format``. Return None if
    the examples are raw prompts with completions."""
    config = run.config.section(InstructionConfig)
    if config.chat_template is not None:
        return read_template(config.chat_template, f"--chat-template {config.chat_template}")
    own = getattr(run.tokenizer, "transformers_tokenizer", None)
    template = None if own is None else own.chat_template
    kind = config.prompt_format
    if kind == "auto":
        if _has_pairs(run):
            return None
        kind = "alpaca" if template is None else "chat"
    if kind == "chat":
        return None if own is None or template is None else own.get_chat_template()
    if kind == "plain" and _has_pairs(run):
        return None
    bos, ids = run.tokenizer.special_ids.bos, list(run.tokenizer.tokenize("a"))
    begins_texts = bos is not None and len(ids) > 1 and ids[0] == bos
    begin = "bos_token" if begins_texts else "''"
    text = (_ALPACA if kind == "alpaca" else _PLAIN).replace("PREAMBLE", ALPACA_PREAMBLE)
    return text.replace("BEGIN", begin)


def _has_pairs(run: Run) -> bool:
    """Return whether the first example is a raw prompt with its completion."""
    train = parts_of(run.config).train
    assert train is not None
    file = example_files(train.sources[0].paths[0])[0]
    columns = RecordColumns.of(run.config.section(InstructionConfig))
    if run.config.section(ReinforcementConfig).rl is not None:
        _, prompt = next(iter(read_prompts(file.path, columns)))
        return prompt.example.is_pair
    if run.config.section(PreferenceConfig).preference is not None:
        _, preference = next(iter(read_preferences(file.path, columns)))
        return preference.is_text
    _, example = next(iter(read_examples(file.path, columns)))
    return example.is_pair


def write_chat_format(folder: Path, run: Run, ends: frozenset[int]) -> bool:
    """Add the chat template and the answers' end tokens ``ends`` to an exported model. Return
    whether the model has a chat template."""
    template = template_of(run)
    settings = folder / "tokenizer_config.json"
    if template is not None and settings.is_file():
        (folder / "chat_template.jinja").write_text(template, "utf-8")
        content = dict(read_json(settings, lenient=True))
        content.pop("chat_template", None)
        write_json(settings, content)
    path = folder / "generation_config.json"
    if path.is_file():
        written = read_json(path, lenient=True)
        write_json(path, with_ends(written, [*ends_of(written), *sorted(ends)]))
    return template is not None
