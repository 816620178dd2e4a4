"""Warnings about examples: each for the mistake that it names, and none for good data."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config import RunConfig, TokenizerConfig
from megatron.families.gpt import GPTData
from megatron.features.instruction.example_checks import (
    Base,
    answer_ends,
    check_examples,
    template_in,
)
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.flags import PreferenceConfig
from megatron.training import build
from megatron.training.resume import ResumePoint

from .conftest import CHATML, Built, gpt2, with_template, write

__all__ = ["gpt2", "with_template", "write"]

CHATS = [
    {"messages": [{"role": "user", "content": f"Mars {n}?"}, {"role": "assistant", "content": "?"}]}
    for n in range(4)
]
PAIRS = [{"instruction": f"Mars {n}?", "chosen": "Earth", "rejected": "Venus"} for n in range(4)]
ENDLESS = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}" + (
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def pipeline(built: Built, path: str, gpt_config, **flags) -> GPTData:
    """The data of a run on instructions or, with ``preference``, on pairs."""
    config: RunConfig = gpt_config()
    loss = flags.pop("preference", None)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, seq_length=128),
        data=dataclasses.replace(config.data, data_path=(path,), split="1,0,0"),
        tokenizer=built.config,
        sections=(InstructionConfig(sft=loss is None, **flags), PreferenceConfig(preference=loss)),
    )
    return GPTData(config, built.tokenizer)


def findings(data: GPTData, base: Base = Base()) -> list[str]:  # noqa: B008  # immutable
    train = data.datasets((8, 0, 0)).train
    assert train is not None
    return [str(found) for found in check_examples(data, train, base)]


def test_good_data(gpt2: Built, with_template, write, gpt_config) -> None:
    built, path = with_template(CHATML), write(CHATS)
    known = Base(built.tokenizer.vocab_size, CHATML)
    assert findings(pipeline(built, path, gpt_config), known) == []
    assert findings(pipeline(built, path, gpt_config, packing=True), known) == []
    assert findings(pipeline(gpt2, path, gpt_config)) == []
    pairs = write(PAIRS, "pairs.jsonl")
    assert findings(pipeline(built, pairs, gpt_config, preference="dpo"), known) == []


@pytest.mark.parametrize("flags", [{}, {"packing": True}, {"preference": "dpo"}], ids=str)
def test_a_template_without_an_end(flags: dict, with_template, write, gpt_config) -> None:
    path = write(PAIRS if flags.get("preference") else CHATS)
    (found,) = findings(pipeline(with_template(ENDLESS), path, gpt_config, **flags))
    assert found.startswith("no answer ends with a special token")
    assert "\n    | [[[user] Mars" in found and "--chat-template FILE" in found


def test_no_end_where_it_does_not_count(with_template, write, gpt_config) -> None:
    marked = ENDLESS.replace(
        "{{ m['content'] }}",
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}",
    )
    (found,) = findings(pipeline(with_template(marked), write(CHATS), gpt_config))
    assert "inside of {% generation %}" in found


def test_samples_without_a_loss(with_template, write, gpt_config) -> None:
    data = pipeline(with_template(CHATML), write(CHATS), gpt_config)
    train = data.datasets((8, 0, 0)).train
    samples = [train[n] for n in range(8)]
    samples[3].loss_mask_S[:] = 0
    (found,) = map(str, check_examples(data, samples))
    assert found.startswith("1 of the first 8 samples have no token that counts")
    assert "[[<|im_start|>user" in found


def test_tokens_outside_of_the_table(gpt2: Built, with_template, write, gpt_config) -> None:
    built, path = with_template(CHATML), write(CHATS)
    size = built.tokenizer.vocab_size
    data = pipeline(built, path, gpt_config)
    (found,) = findings(data, Base(size - 2))
    assert f"the tokenizer has {size} tokens and the base's table {size - 2}: ids from" in found
    assert "samples contain '<|im_start|>', '<|im_end|>'" in found
    assert findings(data, Base(size)) == findings(data, Base(size + 5)) == []
    plain = pipeline(built, path, gpt_config, prompt_format="alpaca")
    (found,) = findings(plain, Base(size - 2))
    assert "the samples that were looked at have none of them" in found


def test_a_base_with_another_template(gpt2: Built, with_template, write, gpt_config) -> None:
    built, path = with_template(CHATML), write(CHATS)
    for flags in ({"prompt_format": "alpaca"}, {"prompt_format": "plain"}):
        (found,) = findings(pipeline(built, path, gpt_config, **flags), Base(None, CHATML))
        assert found.startswith("the base answers in a chat template of its own")
        assert "--- the base's own template:\n    | <|im_start|>user\n    | Mars 0?" in found
    same = "{# the same #}" + CHATML
    assert findings(pipeline(built, path, gpt_config), Base(None, same)) == []
    pairs = write(PAIRS, "pairs.jsonl")
    data = pipeline(built, pairs, gpt_config, preference="dpo", prompt_format="alpaca")
    assert "### Instruction:\n    | Mars 0?" in findings(data, Base(None, CHATML))[0]


def test_templates_of_folders(tmp_path: Path) -> None:
    assert template_in(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "a"}))
    assert template_in(tmp_path) is None
    settings.write_text(json.dumps({"chat_template": "A"}))
    assert template_in(tmp_path) == "A"
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings.write_text(json.dumps({"chat_template": several}))
    assert template_in(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert template_in(tmp_path) == "J"


def test_the_end_that_examples_teach(gpt2: Built, with_template, write, gpt_config) -> None:
    """For what finetune.py trains: a special token near the end of an answer, nothing else."""
    marked = CHATML.replace(
        "{{ message['content'] + '<|im_end|>' }}{% else",
        "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else",
    )
    path, pairs = write(CHATS), write(PAIRS, "pairs.jsonl")
    built = with_template(CHATML)
    begin, end = built.tokenizer.tokenize("<|im_start|><|im_end|>")
    full_stop, eos = built.tokenizer.tokenize("?")[0], built.tokenizer.eos

    def ends(built: Built, path: str, **flags) -> frozenset[int]:
        train = pipeline(built, path, gpt_config, **flags).datasets((8, 0, 0)).train
        assert train is not None
        return answer_ends(train, built.tokenizer, [begin, full_stop])

    assert ends(built, path) == ends(with_template(marked), path) == {eos, end, begin}
    assert ends(built, path, packing=True) == {eos, end, begin}
    assert ends(built, pairs, preference="dpo") == {eos, end, begin}
    assert ends(with_template(ENDLESS), path) == {eos, begin}
    assert ends(built, path, prompt_format="alpaca") == {eos, begin}


@pytest.mark.parametrize("base", ["none", "same", "another"])
def test_checkpoints_of_examples_end_where_answers_do(
    base: str, with_template, write, gpt_config, tmp_path: Path
) -> None:
    """Also those of pretrain_gpt.py; with the base's ends only if ids are the base's."""
    built, path = with_template(CHATML), write(CHATS)
    begin, end = built.tokenizer.tokenize("<|im_start|><|im_end|>")
    data = pipeline(built, path, gpt_config)
    run: Any = SimpleNamespace(config=data.config, tokenizer=built.tokenizer)
    examples: Any = SimpleNamespace(weighed=True, datasets=data.datasets((8, 0, 0)))
    tokenizers = {"none": None, "same": built.config}
    of_base = tokenizers.get(base, TokenizerConfig("ByteLevelTokenizer"))
    known = {"eos_token_id": begin, "pad_token_id": 3, "top_p": 0.5}
    point = ResumePoint(generation=known if of_base else {}, tokenizer=of_base)
    build._tokenizer_writer(run, examples, point)(tmp_path / "tokenizer")
    written = json.loads((tmp_path / "tokenizer/generation_config.json").read_text())
    ends = [begin] * (base == "same") + sorted({built.tokenizer.eos, end})
    kept = {"same": {"pad_token_id": 3, "top_p": 0.5}, "another": {"top_p": 0.5}}
    assert written == {"eos_token_id": ends} | kept.get(base, {})
