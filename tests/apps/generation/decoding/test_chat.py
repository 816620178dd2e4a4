"""Conversations are written as transformers writes them; hostile templates do no harm."""

import json
import multiprocessing
import os
import pickle
import time
import warnings

import pytest
from small_tokenizers import small_tokenizers

pytest.importorskip("jinja2", reason="chat templates need the extra serve")

from megatron.apps.generation.decoding.chat import ChatFormat  # noqa: E402
from megatron.features.instruction.chat_process import TemplateProcess  # noqa: E402

TEMPLATES = {
    "turns": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}"
        "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "instructions": (
        "{%- if messages[0].role == 'system' -%}\n"
        "    {%- set system = messages[0].content -%}{%- set messages = messages[1:] -%}\n"
        "{%- endif -%}\n"
        "{%- for m in messages -%}\n"
        "    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
        "        {{- raise_exception('roles must alternate') -}}\n"
        "    {%- endif -%}\n"
        "    {%- if m.role == 'user' -%}\n"
        "        [INST] {% if loop.first and system is defined %}{{ system }}\n{% endif %}"
        "{{ m.content }} [/INST]\n"
        "    {%- else -%} {{ m.content }}</s>{%- endif -%}\n"
        "{%- endfor -%}"
    ),
    "state and tools": (
        "{% set ns = namespace(count=0, self=1) %}"
        "{%- macro entry(tool) %}- {{ tool | tojson(indent=2) }}\n{% endmacro %}"
        "{% if tools %}Tools:\n{% for t in tools %}{{ entry(t) }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% if ns.count > 3 %}{% break %}{% endif %}{% set ns.count = ns.count + 1 %}"
        "{{ ns.count }}:{{ m | tojson }}{% generation %}{{ m.content }}{% set x = 1 %}"
        "{% endgeneration %}{{ x is defined }}\n{% endfor %}"
        "{{ dict(a=1)['a'] }}{{ documents is none }}{{ strftime_now('%Y') | length }}"
        "{{ messages[0].reasoning_content or '' }}{{ messages | map(attribute='role') | join }}"
    ),
    "parts": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}\n{% endfor %}"
        "   {% if add_generation_prompt %}\n>{% endif %}\n"
    ),
}
CONVERSATIONS = [
    [{"role": "user", "content": " Hé <b> & 'quoted' \n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "日本語?", "name": None},
        {"role": "assistant", "content": "Yes", "thinking": "hm"},
        {"role": "user", "content": "{{ 7 * 7 }}{% raise %}"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "assistant", "content": "first", "reasoning": "thought"}],
    [{"role": "user", "content": str(n)} for n in range(6)],
]
TOOL = {"type": "function", "function": {"name": "f<", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = small_tokenizers(tmp_path_factory.mktemp("tokenizers"))["hf_gpt2"]()
    tokenizer.transformers_tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return tokenizer


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess()
    yield process
    process.close()


def of_transformers(tokenizer, messages, **options):
    """The text, or None where the template refuses the messages."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_against_transformers(tokenizer, process, name):
    theirs = tokenizer.transformers_tokenizer
    theirs.chat_template = TEMPLATES[name]
    ours = ChatFormat(ChatFormat.of(tokenizer).templates, theirs.special_tokens_map, (), process)
    written = 0
    for messages in CONVERSATIONS:
        for options in ({}, {"add_generation_prompt": False}, {"tools": [TOOL]}):
            wanted = {"add_generation_prompt": True} | options
            expected = of_transformers(theirs, messages, **wanted)
            if expected is None:
                with pytest.raises(ValueError, match="refuses the conversation"):
                    ours.render(messages, **options)
                continue
            assert ours.render(messages, **options) == expected
            ids = theirs.apply_chat_template(messages, return_dict=False, **wanted)
            assert ours.tokens(tokenizer, messages, **options) == ids
            written += 1
    theirs.chat_template = None
    assert written >= 4


def test_a_template_by_name_and_options(tokenizer, process):
    templates = {"default": "plain {{ mood }}", "tool_use": "tools {{ tools | length }}"}
    chat = ChatFormat(templates, {}, (), process)
    message = [{"role": "user", "content": "x"}]
    assert chat.render(message, mood="good") == "plain good"
    assert chat.render(message, tools=[TOOL]) == "tools 1"
    with pytest.raises(ValueError, match="no default chat template; it has other"):
        ChatFormat({"other": "x"}).render(message)


def test_templates_of_files(tmp_path, tokenizer):
    plain = small_tokenizers(tmp_path)["gpt2"]()
    config = {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}!"}],
        "bos_token": {"content": "<s>"},
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatFormat.of(plain, tmp_path)
    assert found.templates == {"default": "{{ bos_token }}!"}
    assert found.variables == {"bos_token": "<s>"} and not found.stops
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert ChatFormat.of(plain, tmp_path).templates == {"default": "of a file"}
    assert ChatFormat.of(plain, tmp_path, "given").templates == {"default": "given"}
    assert not ChatFormat.of(plain).templates


def test_without_a_template(tmp_path):
    tokenizer = small_tokenizers(tmp_path)["gpt2"]()
    chat = ChatFormat.of(tokenizer)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
        {"role": "assistant", "content": "Me."},
    ]
    text = "Be brief.\nUser: Who?\nAssistant: Me.\n"
    assert chat.render(messages, add_generation_prompt=False) == text
    assert chat.render(messages) == text + "Assistant:"
    assert chat.tokens(tokenizer, messages) == tokenizer.tokenize(text + "Assistant:")
    assert chat.stops == ("\nUser:",)
    with pytest.raises(ValueError, match="reads text only"):
        chat.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(ValueError, match="needs a message"):
        chat.render([])


HOSTILE = {
    "attribute": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "function": "{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "filter": "{{ messages | attr('__class__') | attr('__mro__') | first }}",
    "import": "{% import 'os' as os %}{{ os.getcwd() }}",
    "include": "{% include '/etc/passwd' %}",
    "change": "{{ messages.append(1) }}{{ messages.clear() }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "namespace of a dict": "{% set ns = namespace({'__init__': 1}) %}",
    "dict": "{{ dict.__mro__[1].__subclasses__() }}",
    "syntax": "{% for %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "text": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "memory": "{{ ('x' * 10 ** 10) | length }}",
    "memory of a filter": "{{ 'x' | center(10 ** 10) }}",
    "depth": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(process, name):
    chat, start = ChatFormat({"default": HOSTILE[name]}, {}, (), process), time.perf_counter()
    message = [{"role": "user", "content": "x"}]
    refused = ""
    try:
        text = chat.render(message)
    except ValueError as error:
        refused = str(error)
    else:  # the sandbox gives undefined values for some, which are no text
        assert text == "", name
    assert "namespace has no attribute" in refused or "namespace" not in name
    assert "root:" not in refused and len(refused) < 700
    assert time.perf_counter() - start < 10
    assert ChatFormat({"default": "{{ 6 * 7 }}"}, {}, (), process).render(message) == "42"


def test_a_template_without_end_is_ended(monkeypatch):
    monkeypatch.setattr("megatron.features.instruction.chat_process._SECONDS", 0.3)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    process = TemplateProcess()
    with pytest.raises(ValueError, match="too much time or memory"):
        process.render(loops, {})
    monkeypatch.setattr("megatron.features.instruction.chat_process._SECONDS", 10)
    assert process.render("again", {}) == "again"
    process.close()


def _renders(process):
    os._exit(process.render("{{ 2 * 3 }}", {}) != "6")


def test_a_forked_copy_has_a_process_of_its_own(process):
    """Workers of a loader are forked, and must not answer each other's conversations."""
    assert process.render("{{ 1 }}", {}) == "1"
    before = process._process.pid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork next to other threads
        child = multiprocessing.get_context("fork").Process(target=_renders, args=(process,))
        child.start()
    child.join(60)
    assert child.exitcode == 0
    assert process.render("{{ 3 }}", {}) == "3" and process._process.pid == before
    assert pickle.loads(pickle.dumps(process))._process is None


def test_marks_are_places_in_the_text(process):
    template = "ab{% generation %}cd{% endgeneration %}e{% generation %}{{ x }}{% endgeneration %}"
    found = process.render_marked(template, {"x": "fgh"})
    assert found == ("abcdefgh", [(2, 4), (5, 8)])
    assert process.render_marked("none", {}).marks == []


def test_values_that_are_no_json(process):
    with pytest.raises(ValueError, match="not made of JSON values"):
        process.render("{{ x }}", {"x": object()})
