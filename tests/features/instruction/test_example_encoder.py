"""Formats and loss masks, against texts written out and against transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.instruction.conversations import Example, parse_example
from megatron.features.instruction.example_encoder import EncodedExample, ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.tokenizer import build_tokenizer

from .conftest import CHATML, MARKED, Built

PLANETS = {"instruction": "Name the planets", "output": "Mercury, Venus"}
LARGE = {"instruction": "Which is large?", "input": "Mars, Saturn", "output": "Saturn."}
PAIR = {"prompt": "Mercury, Venus,", "completion": " Earth, Mars"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Say it shortly."},
        {"role": "user", "content": "Name two planets"},
        {"role": "assistant", "content": "Earth and Mars"},
        {"role": "user", "content": "And large ones?"},
        {"role": "assistant", "content": " Jupiter, Saturn "},
    ]
}
PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)


def encode(built: Built, record: dict | Example, **flags) -> EncodedExample:
    example = record if isinstance(record, Example) else parse_example(record)
    encoder = ExampleEncoder(InstructionConfig(**flags), built.tokenizer, built.config)
    (encoded,) = encoder([("here", example)])
    assert encoded.tokens.dtype == np.int32 and encoded.counted.dtype == np.bool_
    assert len(encoded.tokens) == len(encoded.counted)
    return encoded


def parts(built: Built, encoded: EncodedExample) -> list[tuple[bool, str]]:
    """(counted, text) of each run of tokens that count or do not."""
    found: list[tuple[bool, list[int]]] = []
    for token, counted in zip(encoded.tokens.tolist(), encoded.counted.tolist(), strict=True):
        if not found or found[-1][0] != counted:
            found.append((counted, []))
        found[-1][1].append(token)
    return [(counted, built.tokenizer.detokenize(ids)) for counted, ids in found]


EOD = "<|endoftext|>"


def test_alpaca_by_hand(gpt2: Built) -> None:
    assert parts(gpt2, encode(gpt2, PLANETS)) == [
        (False, f"{PREAMBLE}\n\n### Instruction:\nName the planets\n\n### Response:\n"),
        (True, f"Mercury, Venus{EOD}"),
    ]
    with_input = PREAMBLE.replace(
        "a task.", "a task, paired with an input that provides further context."
    )
    assert parts(gpt2, encode(gpt2, LARGE)) == [
        (
            False,
            f"{with_input}\n\n### Instruction:\nWhich is large?\n\n### Input:\nMars, Saturn\n\n"
            "### Response:\n",
        ),
        (True, f"Saturn.{EOD}"),
    ]
    assert parts(gpt2, encode(gpt2, CHAT)) == [
        (False, "Say it shortly.\n\n### Instruction:\nName two planets\n\n### Response:\n"),
        (True, f"Earth and Mars{EOD}"),
        (False, "### Instruction:\nAnd large ones?\n\n### Response:\n"),
        (True, f" Jupiter, Saturn {EOD}"),
    ]


def test_plain_by_hand(gpt2: Built) -> None:
    expected = [(False, "Mercury, Venus,"), (True, f" Earth, Mars{EOD}")]
    assert parts(gpt2, encode(gpt2, PAIR)) == expected
    assert parts(gpt2, encode(gpt2, LARGE, prompt_format="plain")) == [
        (False, "Which is large?\nMars, Saturn\n"),
        (True, f"Saturn.{EOD}"),
    ]
    # A pair is one text: its tokens are those of the text.
    whole = gpt2.tokenizer.tokenize("Mercury, Venus, Earth, Mars")
    assert encode(gpt2, PAIR).tokens.tolist() == [*whole, gpt2.tokenizer.eod]


def test_token_across_the_border_belongs_to_the_answer(gpt2: Built) -> None:
    text = "Uranus and Neptune."
    ids = gpt2.tokenizer.tokenize(text)
    place = next(k for k, i in enumerate(ids) if k and len(gpt2.tokenizer.detokenize([i])) > 2)
    border = len(gpt2.tokenizer.detokenize(ids[:place])) + 1
    encoded = encode(gpt2, {"prompt": text[:border], "completion": text[border:]})
    assert encoded.tokens.tolist() == [*ids, gpt2.tokenizer.eod]
    assert encoded.counted.tolist() == [k >= place for k in range(len(ids) + 1)]


@pytest.mark.parametrize(
    ("loss_on", "counted"),
    [
        ("all", [f"Earth and Mars{EOD}", f" Jupiter, Saturn {EOD}"]),
        ("last", [f" Jupiter, Saturn {EOD}"]),
    ],
)
def test_loss_on(loss_on: str, counted: list[str], gpt2: Built) -> None:
    found = parts(gpt2, encode(gpt2, CHAT, loss_on=loss_on))
    assert [text for counts, text in found if counts] == counted


def test_loss_on_everything(gpt2: Built, with_template) -> None:
    for built in (gpt2, with_template(CHATML), with_template(MARKED)):
        encoded = encode(built, CHAT, loss_on="everything")
        assert encoded.counted.tolist() == [False] + [True] * (len(encoded.tokens) - 1)


def test_prompt_without_a_token(gpt2: Built) -> None:
    """Nothing predicts the first token of an answer without a prompt."""
    encoded = encode(gpt2, {"prompt": "", "completion": "Mars"})
    assert encoded.counted.tolist() == [False] + [True] * (len(encoded.tokens) - 1)


def marks_of_transformers(built: Built, template: str, record: dict) -> tuple[list, list]:
    tokenizer = AutoTokenizer.from_pretrained(built.config.tokenizer_model)
    encoded = tokenizer.apply_chat_template(
        record["messages"],
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return encoded["input_ids"], encoded["assistant_masks"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["spans", "marks"])
def test_chat_against_transformers(template: str, with_template) -> None:
    """With and without marks in the template the answers are those that transformers finds by
    marks."""
    built = with_template(template)
    encoded = encode(built, CHAT)
    ids, marks = marks_of_transformers(built, MARKED, CHAT)
    assert encoded.tokens.tolist() == ids
    assert encoded.counted.astype(int).tolist() == marks
    assert [text for counts, text in parts(built, encoded) if counts] == [
        "Earth and Mars<|im_end|>",
        " Jupiter, Saturn <|im_end|>",
    ]
    last = parts(built, encode(built, CHAT, loss_on="last"))
    assert [text for counts, text in last if counts] == [" Jupiter, Saturn <|im_end|>"]
    assert len(parts(built, encoded)[0][1]) > 20


def test_template_file_over_any_tokenizer(gpt2: Built, with_template, tmp_path: Path) -> None:
    """The marks of a file's template, over GPT-2's tokens and over those of transformers."""
    path = tmp_path / "template.jinja"
    path.write_text(MARKED)
    flags = {"chat_template": str(path)}
    on_gpt2 = parts(gpt2, encode(gpt2, CHAT, **flags))
    built = with_template("{{ 'the tokenizer has another one' }}")
    assert on_gpt2 == parts(built, encode(built, CHAT, **flags))
    assert [counts for counts, _ in on_gpt2] == [False, True, False, True, False]


def test_pairs_and_instructions_with_a_template(with_template: Callable[..., Built]) -> None:
    built = with_template(CHATML)
    assert parts(built, encode(built, PAIR))[0] == (False, "Mercury, Venus,")
    chat = parts(built, encode(built, PAIR, prompt_format="chat"))
    assert chat[0][1] == "<|im_start|>user\nMercury, Venus,<|im_end|>\n<|im_start|>assistant\n"
    large = parts(built, encode(built, LARGE))
    assert large[0][1].startswith("<|im_start|>user\nWhich is large?\nMars, Saturn<|im_end|>")
    assert parts(built, encode(built, LARGE, prompt_format="alpaca"))[0][1].startswith("Below")


HEADERS = (
    "{% for m in messages %}{{ '<|header|>' + m['role'] + '<|end|>\\n\\n' + m['content'] | trim "
    "+ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|header|>assistant<|end|>\\n\\n' }}{% endif %}"
)
"""Like Llama 3's: content is stripped, and no white space between turns."""
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Like Mistral's: nothing marks where an answer is to be generated."""


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (HEADERS, ["Earth and Mars<|eot|>", "Jupiter, Saturn<|eot|>"]),
        (BRACKETS, [f" Earth and Mars{EOD}", f"  Jupiter, Saturn {EOD}"]),
    ],
    ids=["headers", "brackets"],
)
def test_templates_of_other_shapes(template: str, answers: list[str], with_template) -> None:
    built = with_template(template)
    found = parts(built, encode(built, CHAT))
    assert [text for counts, text in found if counts] == answers
    rendered = built.tokenizer.transformers_tokenizer.apply_chat_template(
        CHAT["messages"], tokenize=False
    )
    assert "".join(text for _, text in found) == rendered


FORGETFUL = CHATML.replace(
    "{{ message['content'] + '<|im_end|>' }}{% else",
    "{{ (message['content'] if loop.last else '...') + '<|im_end|>' }}{% else",
)
"""Writes earlier answers in another way, as templates do that drop reasoning."""


def test_answers_that_cannot_be_told(with_template) -> None:
    built = with_template(FORGETFUL)
    with pytest.raises(ValueError, match="here: the chat template writes message 3 in another way"):
        encode(built, CHAT)
    last = parts(built, encode(built, CHAT, loss_on="last"))
    assert [text for counts, text in last if counts] == [" Jupiter, Saturn <|im_end|>"]


def test_conversation_that_a_template_refuses(with_template) -> None:
    built = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="here: the chat template refuses .*must alternate"):
        encode(built, CHAT)


HARMFUL = {
    "no end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ ('x' * 10 ** 10) | length }}",
    "text": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "code": "{{ cycler.__init__.__globals__.os.getcwd() }}",
    "no template": "{% for %}",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_template_is_refused_by_name(name: str, with_template, monkeypatch) -> None:
    monkeypatch.setattr(
        "megatron.features.instruction.chat_process._SECONDS", 0.5 if name == "no end" else 10
    )
    with pytest.raises(ValueError, match="^here: the chat template") as caught:
        encode(with_template(HARMFUL[name]), CHAT)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_file_that_is_no_template(gpt2: Built, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    for content, message in [(b"\xff", "is not UTF-8"), (b"x" * (1 << 21), "no chat template has")]:
        path.write_bytes(content)
        flags = InstructionConfig(chat_template=str(path))
        with pytest.raises(ValueError, match=f"--chat-template {path} .*{message}"):
            ExampleEncoder(flags, gpt2.tokenizer, gpt2.config)


def test_flags_that_contradict(gpt2: Built, tmp_path: Path) -> None:
    for flags, error, message in [
        ({"prompt_format": "chat"}, ConfigError, "has no chat template"),
        (
            {"chat_template": str(tmp_path / "x")},
            FileNotFoundError,
            "--chat-template .*is not a file",
        ),
        (
            {"chat_template": "x", "prompt_format": "alpaca"},
            ConfigError,
            "--prompt-format alpaca and --chat-template x contradict",
        ),
    ]:
        with pytest.raises(error, match=message):
            ExampleEncoder(InstructionConfig(**flags), gpt2.tokenizer, gpt2.config)


def test_text_that_cannot_be_tokenized_is_named(gpt2: Built) -> None:
    encoder = ExampleEncoder(InstructionConfig(), gpt2.tokenizer, gpt2.config)
    bad = parse_example({"prompt": "a", "completion": "\ud800"})
    good = parse_example(PAIR)
    with pytest.raises(ValueError, match="line 2: "):
        encoder([("line 1", good), ("line 2", bad)])


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["spans", "marks"])
def test_tokenizer_with_a_token_before_each_text(template: str, with_template) -> None:
    """The template writes it or not; in plain text it is there once, and no answer."""
    built = with_template("{{ eos_token }}" + template, begin=True)
    first = built.tokenizer.eod
    assert built.tokenizer.tokenize("a")[0] == first
    ids, marks = marks_of_transformers(built, "{{ eos_token }}" + MARKED, CHAT)
    encoded = encode(built, CHAT)
    assert encoded.tokens.tolist() == ids and ids.count(first) == 1
    assert encoded.counted.astype(int).tolist() == marks
    pair = encode(built, PAIR)
    whole = built.tokenizer.tokenize("Mercury, Venus, Earth, Mars")
    assert pair.tokens.tolist() == [*whole, first] and whole[0] == first
    assert parts(built, pair)[1] == (True, f" Earth, Mars{EOD}")


@pytest.mark.realdata
def test_llama2_pairs_begin_once(realdata: Path) -> None:
    """A tokenizer that puts a beginning-of-text token before each text: it is no answer."""
    config = TokenizerConfig(
        tokenizer_type="Llama2Tokenizer",
        tokenizer_model=str(realdata / "tokenizers_sp" / "llama2_tokenizer.model"),
    )
    built = Built(config, build_tokenizer(config))
    encoded = encode(built, PAIR)
    whole = built.tokenizer.tokenize("Mercury, Venus, Earth, Mars")
    assert encoded.tokens.tolist() == [*whole, built.tokenizer.eod]
    answer = built.tokenizer.detokenize(encoded.tokens[encoded.counted][:-1].tolist())
    assert answer.split() == ["Earth,", "Mars"]
