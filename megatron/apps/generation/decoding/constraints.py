"""Texts that must match a regular expression, a JSON schema or a grammar, by llguidance.

A client may be hostile. The size of a source is limited, its automata are bounded by llguidance's
limits, and it is first compiled in a separate process, which is killed if it takes too much time or
memory. References of a schema are resolved within the schema only.
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
# White space between the parts of JSON: one space, or a new line with its indentation. Weak models
# write it without end where they can.
_JSON_SPACE = r"( |\r?\n[ \t]{0,40})"
_KEPT = 64
_CHECKS = threading.BoundedSemaphore(2)  # processes at a time


class TokenConstraint:
    """The tokens that may come next in one sequence; ``finished`` once the text matches and nothing
    can follow, or a stop token has ended it."""

    def __init__(
        self, matcher: Any, vocab_size: int, stop_tokens: Collection[int], name: str
    ) -> None:
        """``matcher`` is an LLMatcher whose end token is the id ``vocab_size``."""
        self._matcher, self._vocab_size, self._name = matcher, vocab_size, name
        self._stops = [token for token in stop_tokens if token < vocab_size]
        self.finished = False

    def allowed(self) -> Mask:
        """The tokens that may come next; stop tokens where the text matches as a whole. Raises
        ValueError if no token fits, or the constraint is too complex."""
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
        """Takes an allowed token."""
        if token in self._stops:
            self.finished = True
            return
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} does not match the {self._name}")
        self.finished = self._matcher.is_stopped()


class ConstraintCompiler:
    """Compiles constraints for the tokens of a model. May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size`` is the number of the model's logits, not of the tokenizer's ids."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def compile(self, constraint: Constraint, stop_tokens: Collection[int]) -> TokenConstraint:
        """A new sequence's state; a new source takes some tenths of a second. Raises ValueError
        if it is malformed, too large or too complex, or the tokenizer cannot write it, or
        llguidance is not installed."""
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
    """A tokenizer for llguidance. Special tokens are not text, so that nothing matches them. The
    vocabulary is followed by the end of a text and the bytes that are not tokens, since every text
    that must come must have tokens."""

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
        """Return the tokens of a forced text: the tokenizer's, if they decode to this text alone.
        An error would end the process."""
        try:
            ids = self._own.tokenize(text)
            tokens = [self.tokens[i] for i in ids]
            if all(tokens) and b"".join(tokens) == text.encode():
                return ids
        except Exception:  # a tokenizer may raise anything; its tokens are tried one by one then
            pass
        return self.tokenizer.greedy_tokenize(text) if self.tokenizer else []


def _grammar(constraint: Constraint) -> str:
    """The grammar in llguidance's form."""
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
    """Compiles a grammar in another process. Raises ValueError if that fails or takes too much."""
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
