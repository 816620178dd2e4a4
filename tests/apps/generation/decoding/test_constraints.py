"""Constrained texts match, whatever the logits; hostile constraints are refused."""

import json
import random
import re
import time

import numpy as np
import pytest
import torch
from small_tokenizers import small_tokenizers

from megatron.apps.generation.decoding.sampling import TokenSampler
from megatron.apps.generation.decoding.text_stream import continuation_text
from megatron.apps.generation.request import Constraint, Sampling

pytest.importorskip("llguidance", reason="constraints need the extra serve")

from megatron.apps.generation.decoding.constraints import ConstraintCompiler  # noqa: E402

ALL = ["gpt2", "ranks", "bytes", "llama", "unigram", "with_specials", "wordpiece"]
KINDS = [*ALL, *(f"hf_{name}" for name in ALL)]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def in_this_process(request, monkeypatch):
    """A process for each source would take too long here."""
    own = ("all of many", "not a regex", "a_compilation")
    if not any(name in request.node.name for name in own):
        monkeypatch.setattr(
            "megatron.apps.generation.decoding.constraints._check", lambda grammar, name: None
        )


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    """A compiler by the name of its tokenizer; logits have 5 more columns than that has ids."""
    makers, made = small_tokenizers(tmp_path_factory.mktemp("tokenizers")), {}

    def get(name):
        if name not in made:
            tokenizer = makers[name]()
            made[name] = tokenizer, ConstraintCompiler(tokenizer, tokenizer.vocab_size + 5)
        return made[name]

    return get


def constrained(tokenizer, compiler, constraint, seed, greedy=False, prompt=(), most=400):
    """The text of random logits, without what ends it, and how it ended."""
    stop = sorted(tokenizer.special_tokens)[-1]
    constraint = compiler.compile(constraint, [stop])
    generator = torch.Generator().manual_seed(seed)
    sampler = TokenSampler(Sampling(greedy=greedy, seed=seed, temperature=0.5), prompt)
    tokens = []
    while not constraint.finished and len(tokens) < most:
        logits = torch.randn(tokenizer.vocab_size + 5, generator=generator)
        tokens.append(sampler.choose(logits, constraint.allowed()))
        constraint.advance(tokens[-1])
    if tokens[-1] == stop:
        tokens.pop()
    assert not set(tokens) & tokenizer.special_tokens
    return continuation_text(tokenizer, prompt, tokens), constraint.finished


@pytest.mark.parametrize("kind", KINDS)
def test_a_regular_expression_matches_as_a_whole(compilers, kind):
    tokenizer, compiler = compilers(kind)
    prompt = tokenizer.tokenize("The dog")
    for pattern in (r"(the|a)( [a-z]{1,5}){1,3}[.!]", r"-?[0-9]{1,4}(\.[0-9]{2})?", "ab*"):
        for seed in range(3):
            text, finished = constrained(
                tokenizer, compiler, Constraint("regex", pattern), seed, seed == 0, prompt
            )
            assert finished and re.fullmatch(pattern, text), text


@pytest.mark.parametrize("kind", ["gpt2", "llama", "hf_llama"])
def test_a_schema_is_kept(compilers, kind):
    tokenizer, compiler = compilers(kind)
    for seed in range(6):
        text, finished = constrained(
            tokenizer,
            compiler,
            Constraint("json_schema", json.dumps(PERSON)),
            seed,
            prompt=tokenizer.tokenize("The dog"),
        )
        assert finished
        found = json.loads(text)
        assert {"name", "age"} <= found.keys() <= {"name", "age", "tags"}
        assert len(found["name"]) <= 8 and 0 <= found["age"] <= 120
        assert len(found.get("tags", [])) <= 3 and set(found.get("tags", [])) <= {"a", "b"}


def test_white_space_of_json_is_bounded(compilers):
    tokenizer, compiler = compilers("bytes")
    source = Constraint("json_schema", json.dumps(PERSON))
    person = {"name": "A", "age": 3, "tags": ["a", "b"]}
    for indent in (None, 4):
        constraint = compiler.compile(source, [])
        for token in tokenizer.tokenize(json.dumps(person, indent=indent)):
            assert constraint.allowed()[token]
            constraint.advance(token)
        assert constraint.finished
    constraint = compiler.compile(source, [])
    for token in tokenizer.tokenize("{\n"):
        constraint.advance(token)
    assert not constraint.allowed()[ord("\n")]


def test_any_object(compilers):
    tokenizer, compiler = compilers("bytes")
    allowed = compiler.compile(Constraint("json_schema", "{}"), []).allowed()
    assert [i for i in np.flatnonzero(allowed)] == [ord("{")]
    found = [
        constrained(tokenizer, compiler, Constraint("json_schema", "{}"), seed) for seed in range(8)
    ]
    finished = [json.loads(text) for text, end in found if end]
    assert finished and all(isinstance(value, dict) for value in finished)


def test_a_grammar(compilers):
    tokenizer, compiler = compilers("gpt2")
    grammar = Constraint("grammar", 'start: "(" start ")" | /[a-z]/')
    for seed in range(5):
        text, finished = constrained(tokenizer, compiler, grammar, seed)
        depth = text.count("(")
        assert not finished or re.fullmatch(r"\(" * depth + "[a-z]" + r"\)" * depth, text)


def test_stop_tokens_only_where_the_text_matches(compilers):
    tokenizer, compiler = compilers("bytes")
    stops = [tokenizer.eod, ord("b")]
    constraint = compiler.compile(Constraint("regex", "a+"), stops)
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord("a")]
    constraint.advance(ord("a"))
    assert np.flatnonzero(constraint.allowed()).tolist() == sorted([ord("a"), *stops])
    assert not constraint.finished
    constraint.advance(tokenizer.eod)
    assert constraint.finished


def test_a_text_to_which_nothing_can_be_added_is_finished(compilers):
    tokenizer, compiler = compilers("bytes")
    constraint = compiler.compile(Constraint("regex", "ab"), [])
    for token in tokenizer.tokenize("ab"):
        assert not constraint.finished
        assert np.flatnonzero(constraint.allowed()).tolist() == [token]
        constraint.advance(token)
    assert constraint.finished


def test_a_compiled_source_is_kept(compilers, monkeypatch):
    _, compiler = compilers("gpt2")
    source = Constraint("regex", "kept|not")
    first = compiler.compile(source, [])
    monkeypatch.setattr(compiler, "_template", None)  # a second compilation would call it
    second = compiler.compile(source, [])
    token = int(np.flatnonzero(first.allowed())[0])
    first.advance(token)
    assert second.allowed()[token]


NESTED = {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}}
HOSTILE = {
    "not a regex": ("regex", "a(b", "cannot be used"),
    "deep": ("regex", "(" * 4000 + "a" + ")" * 4000, "cannot be used"),
    "long": ("regex", "a" * 10_000, "10,000 characters; it may have 8,192"),
    "surrogate": ("regex", "\ud800", "not valid Unicode"),
    "counted": (
        "regex",
        "x((a{1000}){1000}){1000}",
        "too many expressions|too complex|cannot be used|too much",
    ),
    "forced": (
        "regex",
        "(a{1000}){1000}",
        "too many expressions|too complex|cannot be used|too much",
    ),
    "nothing": ("regex", "[^\\s\\S]", "no token of the tokenizer fits"),
    "not JSON": ("json_schema", "{", "is not JSON"),
    "no object": ("json_schema", "[1]", "must be a JSON object"),
    "nested JSON": ("json_schema", "[" * 60_000, "is not JSON"),
    "deep schema": ("json_schema", '{"not":' * 500 + "{}" + "}" * 500, "cannot be used"),
    "a file": ("json_schema", '{"$ref": "file:///etc/passwd"}', "cannot be used"),
    "a network": ("json_schema", '{"$ref": "http://127.0.0.1:1/"}', "cannot be used"),
    "itself": ("json_schema", '{"$ref": "#"}', "no token of the tokenizer fits"),
    "impossible": ("json_schema", '{"type": "nothing"}', "cannot be used"),
    "unknown": ("json_schema", '{"type": "array", "uniqueItems": true}', "cannot be used"),
    "all of many": (
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(60)]}),
        "cannot be used|too much",
    ),
    "not a grammar": ("grammar", "start: nowhere", "cannot be used"),
    "a file of a grammar": ("grammar", '%import "/etc/passwd"\nstart: /a/', "cannot be used"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.proof) if name == "all of many" else name
        for name in HOSTILE
    ],
)
def test_hostile_sources_are_refused_in_time(compilers, name):
    kind, source, message = HOSTILE[name]
    tokenizer, compiler = compilers("bytes")
    start = time.process_time()
    with pytest.raises(ValueError, match=message) as error:
        constraint = compiler.compile(Constraint(kind, source), [])
        for _ in range(20):  # some are too complex only later
            token = random.Random(0).choice(np.flatnonzero(constraint.allowed()).tolist())
            constraint.advance(token)
    assert time.process_time() - start < 3
    assert len(str(error.value)) < 500 and "root:" not in str(error.value)


def test_a_compilation_that_does_not_end_is_ended(compilers, monkeypatch):
    monkeypatch.setattr("megatron.apps.generation.decoding.constraints._WALL_SECONDS", 0.01)
    with pytest.raises(ValueError, match="takes too much time or memory"):
        compilers("bytes")[1].compile(Constraint("regex", "slow"), [])


@pytest.mark.parametrize("kind", ["null", "ids"])
def test_numbers_are_no_text(compilers, kind):
    with pytest.raises(ValueError, match="writes numbers"):
        compilers(kind)[1].compile(Constraint("regex", "a"), [])


def test_what_the_tokenizer_cannot_write(compilers):
    with pytest.raises(ValueError, match="no token of the tokenizer fits"):
        compilers("unigram")[1].compile(Constraint("regex", "\u4e00"), [])
