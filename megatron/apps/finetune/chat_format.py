"""How the result of a fine-tuning is prompted: chat template and end tokens of its folder, as in
the examples that it was trained on."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.files import read_json, write_json
from megatron.checkpoint.generation_settings import ends_of, with_ends
from megatron.data.sources import parts_of
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import ALPACA_PREAMBLE, read_examples
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import example_files
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.records import read_preferences
from megatron.features.tokenizers.chat_process import read_template
from megatron.run.run import Run

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


def template_of(run: Run) -> str | None:
    """The chat template that writes conversations as the run has read them, if they are not pairs
    of texts: that of ``--chat-template``, of the tokenizer, or one that writes what
    ``--prompt-format`` does."""
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
    begin = "bos_token" if _begins_texts(run) else "''"
    text = (_ALPACA if kind == "alpaca" else _PLAIN).replace("PREAMBLE", ALPACA_PREAMBLE)
    return text.replace("BEGIN", begin)


def _has_pairs(run: Run) -> bool:
    """Whether the first example is a prompt and its completion, as they are."""
    train = parts_of(run.config).train
    assert train is not None
    source = train.sources[0]
    file = example_files(source.paths[0])[0]
    columns = RecordColumns.of(run.config.section(InstructionConfig))
    if run.config.section(PreferenceConfig).preference is not None:
        _, preference = next(iter(read_preferences(file.path, columns)))
        return preference.is_text
    _, example = next(iter(read_examples(file.path, columns)))
    return example.is_pair


def _begins_texts(run: Run) -> bool:
    """Whether the tokenizer puts a token before every text."""
    begin = run.tokenizer.special_ids.bos
    ids = list(run.tokenizer.tokenize("a"))
    return begin is not None and len(ids) > 1 and ids[0] == begin


def write_chat_format(folder: Path, run: Run, ends: frozenset[int]) -> bool:
    """Adds to an exported model what its prompts need, and the tokens ``ends`` at which an answer
    ends; returns whether it has a chat template."""
    template = template_of(run)
    settings = folder / "tokenizer_config.json"
    if template is not None and settings.is_file():
        (folder / "chat_template.jinja").write_text(template, "utf-8")
        content = {
            k: v for k, v in read_json(settings, lenient=True).items() if k != "chat_template"
        }
        write_json(settings, content)
    path = folder / "generation_config.json"
    if path.is_file():
        written = read_json(path, lenient=True)
        write_json(path, with_ends(written, [*ends_of(written), *sorted(ends)]))
    return template is not None
