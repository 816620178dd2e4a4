"""Tokenizers and files of instructions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.config import TokenizerConfig
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.tokenizer import Tokenizer, build_tokenizer

TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nName the planets, and say which of them are large.\n\n"
    "### Response:\nMercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune. "
)
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{{ message['content'] + '<|im_end|>' }}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}

{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""ChatML, without marks around answers."""
MARKED = CHATML.replace(
    "{{ message['content'] + '<|im_end|>' }}{% else",
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else",
)


class Built(NamedTuple):
    config: TokenizerConfig
    tokenizer: Tokenizer


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A small byte-level vocabulary."""
    folder = tmp_path_factory.mktemp("gpt2")
    train_byte_level_bpe([TEXT, "<|endoftext|>"], 400, 2).save_pretrained(folder)
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )
    return Built(config, build_tokenizer(config))


@pytest.fixture(scope="session")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Built]:
    """Makes a tokenizer of transformers over a folder with that chat template; ``begin`` puts a
    token before each text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    def make(template: str | None, begin: bool = False) -> Built:
        folder = tmp_path_factory.mktemp("chat")
        train_byte_level_bpe([TEXT, "<|endoftext|>"], 400, 2).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
        if begin:
            token = tokenizer.eos_token
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{token} $A", special_tokens=[(token, tokenizer.eos_token_id)]
            )
        tokenizer.save_pretrained(folder)
        config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
        return Built(config, build_tokenizer(config))

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes records as JSON lines, or as one array; gives the path."""

    def to_file(records: list, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        if name.endswith(".json"):
            path.write_text(json.dumps(records, indent=1))
        else:
            path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return str(path)

    return to_file
