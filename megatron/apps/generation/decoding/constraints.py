"""Constrained decoding with llguidance: match a regular expression, JSON schema or grammar.

Clients may be hostile. The size of a constraint's source and of the automata that llguidance builds
from it is limited. A constraint is first compiled in a separate process, which is killed if it uses
too much time or memory. References in a schema are resolved within the schema only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.generation.decoding import constraint_check
from megatron.apps.generation.decoding.sampling import Mask
from megatron.apps.generation.request import Constraint
from megatron.tokenizer import Tokenizer

_NAMES = {"regex": "regular expression", "json_schema": "JSON schema", "grammar": "grammar"}
_MOST_CHARACTERS = {"regex": 1 << 13, "json_schema": 1 << 16, "grammar": 1 << 16}
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_CPU_SECONDS, _WALL_SECONDS, _MEMORY = 1, 20, 2 << 30
_SLOWEST_STEP = 1.0
# White space allowed between JSON tokens: one space, or a newline with its indentation. Weak models
# would otherwise write white space without end.
_JSON_SPACE = r"( |\r?\n[ \t]{0,40})"
_KEPT = 64
_CHECKS = threading.BoundedSemaphore(2)  # maximum number of concurrent check processes


class TokenConstraint:
    """Constraint state of one sequence: computes which tokens may come next. ``finished`` is set
    once the text matches and cannot be continued, or once a stop token has been chosen."""

    def __init__(
        self, matcher: Any, vocab_size: int, stop_tokens: Collection[int], name: str
    ) -> None:
        """``matcher`` is an LLMatcher whose end-of-text token has the id ``vocab_size``."""
        self._matcher, self._vocab_size, self._name = matcher, vocab_size, name
        self._stops = [token for token in stop_tokens if token < vocab_size]
        self.finished = False

    def allowed(self) -> Mask:
        """Return the mask of tokens that may come next. Stop tokens are allowed if the text is a
        complete match. Raises ValueError if no token fits or the constraint is too complex."""
        start = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._stops] = self._matcher.is_accepting()
        if self._matcher.is_error() or not allowed.any():
            reason = _first_line(self._matcher)
            if not reason or reason.startswith("NoExtension"):
                reason = "no token of the tokenizer fits"
            raise ValueError(f"the text cannot follow the {self._name} any further: {reason}")
        if time.thread_time() - start > _SLOWEST_STEP:
            raise ValueError(f"the {self._name} is too complex: a token takes too long")
        return allowed

    def advance(self, token: int) -> None:
        """Update the state with the chosen token. Raises ValueError if it is not allowed."""
        if token in self._stops:
            self.finished = True
            return
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} does not match the {self._name}")
        self.finished = self._matcher.is_stopped()


class ConstraintCompiler:
    """Thread-safe compiler and cache of constraints for a model's tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size`` is the number of logits, which may exceed the tokenizer's vocabulary."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def compile(self, constraint: Constraint, stop_tokens: Collection[int]) -> TokenConstraint:
        """Return the constraint state for a new sequence. Compiling a new source takes a few tenths
        of a second. Raises ValueError if the source is malformed, too large or too complex, if the
        tokenizer cannot produce matching text, or if llguidance is not installed."""
        with self._lock:
            template = self._compiled.get(constraint)
        if template is None:
            template = self._template(constraint)
        with self._lock:
            self._compiled[constraint] = template
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            matcher = template.deep_copy()
        return TokenConstraint(matcher, self._vocab_size, stop_tokens, _NAMES[constraint.kind])

    def _template(self, constraint: Constraint) -> Any:
        name = _NAMES[constraint.kind]
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer
        except ImportError:
            raise ValueError(
                f"a {name} needs llguidance, which is not installed: "
                "run pip install -e '.[serve]' in the checkout"
            ) from None
        if not self._tokenizer.writes_text:
            raise ValueError(
                f"a {name} needs a tokenizer of texts; that of this model writes numbers "
                f"({self._tokenizer.source})"
            )
        grammar = _grammar(constraint)
        _check(grammar, name)
        with self._lock:
            if self._tokens is None:
                adapter: Any = _Wrapper(self._tokenizer, self._vocab_size)
                self._tokens = adapter.tokenizer = LLTokenizer(adapter)
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"the {name} cannot be used: {_first_line(matcher)}")
        TokenConstraint(matcher.deep_copy(), self._vocab_size, (), name).allowed()
        return matcher


class _Wrapper:
    """Adapter from a tokenizer to llguidance's interface. Special tokens are mapped to empty
    strings, so that no constraint matches them. The end-of-text token is appended to the
    vocabulary, followed by every single byte that has no token, because llguidance must be able to
    tokenize any forced text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = tokenizer.special_tokens
        tokens = [
            b"" if i in special else token
            for i, token in enumerate(tokenizer.token_bytes[:vocab_size])
        ]
        self.tokens = [*tokens, *[b""] * (vocab_size - len(tokens)), b"<end>"]
        known = set(tokens)
        self.tokens += [b for b in (bytes([byte]) for byte in range(256)) if b not in known]
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self.tokenizer: Any = None
        self._own = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a forced text: the tokenizer's own if they decode to exactly this
        text, otherwise the longest matching tokens. Never raises, because llguidance would end the
        process on an exception."""
        try:
            ids = self._own.tokenize(text)
            tokens = [self.tokens[i] for i in ids]
            if all(tokens) and b"".join(tokens) == text.encode():
                return ids
        except Exception:  # a tokenizer may raise anything; fall back to greedy matching
            pass
        return self.tokenizer.greedy_tokenize(text) if self.tokenizer else []


def _grammar(constraint: Constraint) -> str:
    """Return the constraint's source in llguidance's format. Raises ValueError if it is invalid."""
    from llguidance import LLMatcher

    name, source = _NAMES[constraint.kind], constraint.source
    most = _MOST_CHARACTERS[constraint.kind]
    if len(source) > most:
        raise ValueError(f"the {name} has {len(source):,} characters; it may have {most:,}")
    try:
        source.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the {name} is not valid Unicode") from None
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(source)
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the {name} is not JSON: {str(error)[:200]}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"the {name} must be a JSON object, not {source[:40]!r}")
    schema = schema or {"type": "object"}
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": _JSON_SPACE}
        )
    except ValueError as error:
        raise ValueError(f"the {name} cannot be used: {_first_line(str(error))}") from None


def _check(grammar: str, name: str) -> None:
    """Compile a grammar in a separate process. Raises ValueError if that fails or hits a limit."""
    import llguidance

    limits = {"limits": _LIMITS, "seconds": _CPU_SECONDS, "memory": _MEMORY}
    folder = Path(llguidance.__file__).parent.parent
    command = [sys.executable, "-I", constraint_check.__file__, str(folder)]
    too_much = f"the {name} takes too much time or memory to compile; make it simpler"
    try:
        with _CHECKS:
            done = subprocess.run(
                command,
                input=json.dumps({"grammar": grammar, **limits}),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=_WALL_SECONDS,
            )
    except subprocess.TimeoutExpired:
        raise ValueError(too_much) from None
    if done.returncode:
        raise ValueError(too_much)
    if done.stdout:
        raise ValueError(f"the {name} cannot be used: {_first_line(done.stdout)}")


def _first_line(what: Any) -> str:
    message = what if isinstance(what, str) else what.get_error()
    return message.strip().split("\n")[0][:300]
