"""Model interface of lm-evaluation-harness, implemented with models of this project."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.apps.generation.decoding.chat import ChatFormat
from megatron.apps.generation.request import (
    Beams,
    Completion,
    GenerationRequest,
    Sampling,
    StopRules,
)
from megatron.apps.generation.writing import TextWriter
from megatron.apps.tasks.harness.scoring import (
    AnswerCache,
    Likelihood,
    TextScorer,
    TokenRequest,
    prefix_likelihoods,
)
from megatron.config import ConfigError
from megatron.data.texts import ScoredText
from megatron.families import family_of
from megatron.features.instruction.chat_process import TemplateRefusalError
from megatron.parallel.random import derive_seed
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

_MAX_GEN_TOKS = 256
"""Maximum number of new tokens if a task does not set it."""
_TOP_K = 50
"""top_k if a task does not set it, as in transformers."""
_GENERATION_KWARGS = {
    *("do_sample", "temperature", "until", "max_gen_toks", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "num_beams", "length_penalty"),
}
_CONTINUED = "<the message ends here> "
"""Marker appended to a message that the model is to continue. Chat templates write more text after
the message; it is cut off at this marker."""

_NEAR = 256
"""Number of characters at the end of a context that can affect its continuation's tokens."""

EncodedPair = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts of context and continuation (None for a window of a longer text), then the token ids of the
context and of the continuation."""


class TokenText(str):
    """Token ids disguised as a request's text, because lm-eval only passes texts."""

    tokens: list[int]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> TokenText:
        text = cls(" ".join(map(str, tokens)))
        text.tokens = list(tokens)
        return text


def generation_rules(
    kwargs: Mapping[str, Any], ends: frozenset[int], texts: Iterable[str], task: str, seed: int
) -> tuple[StopRules, Sampling, Beams | None]:
    """Return stop rules, sampling and beam search (None without beams) for a task's
    ``generation_kwargs``. ``ends`` contains the tokens that end a text. ``texts`` contains the
    tokenizer's end tokens as text, which also stop generation if other tokens spell them. Raises
    ConfigError if a setting is unknown or invalid."""
    values: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), _MAX_GEN_TOKS))
    unknown = sorted(set(values) - _GENERATION_KWARGS)
    if unknown:
        raise ConfigError(
            f"task {task}: generation_kwargs, or --gen-kwargs, has {unknown[0]}, which is not "
            f"supported; known are {', '.join(sorted(_GENERATION_KWARGS))}"
        )
    until = values["until"]
    for text in texts:
        until = handle_stop_sequences(until, text)
    until = tuple(text for text in until if text)
    try:
        stopping = StopRules(values["max_gen_toks"], ends, until)
        penalty = float(values.get("repetition_penalty", 1.0))
        sampling = Sampling(greedy=True, repetition_penalty=penalty, seed=seed)
        if values["do_sample"]:
            sampling = Sampling(
                temperature=float(values.get("temperature", 0.0)),
                top_k=int(values.get("top_k", _TOP_K)),
                top_p=float(values.get("top_p", 1.0)),
                min_p=float(values.get("min_p", 0.0)),
                repetition_penalty=penalty,
                seed=seed,
            )
        width, length_penalty = int(values.get("num_beams", 1)), values.get("length_penalty", 1.0)
        beams = Beams(width, float(length_penalty)) if width > 1 else None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task {task}: generation_kwargs, or --gen-kwargs: {error}") from None
    return stopping, sampling, beams


class HarnessModel(TemplateLM):
    """Model that answers lm-eval's requests in the same way as lm-eval's own ``hf`` model. lm-eval
    regards each process as the only one: all ranks make the same calls, and the scorer distributes
    the requests over ranks. Raises ConfigError if the model's family does not predict text.

    Args:
        max_length: maximum number of tokens per request. None uses the model's number of positions.
        prefix_token_id: token before a text without context. None uses the beginning-of-text token,
            or else the end-of-text token.
        ends: tokens that end a generated text.
    """

    def __init__(
        self,
        scorer: TextScorer,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        config = scorer.engine.config
        model, family = config.model, family_of(config.model.family)
        # Fail before prompts are built if the family does not predict text.
        family.scored_lengths(config, [ScoredText(np.zeros(1, np.int64), np.zeros(1, np.int64))])
        self.scorer = scorer
        self.writer: TextWriter | None = None
        self.answer_cache: AnswerCache | None = None
        self.one_prompt: set[str] = set()
        self.text_tokenizer = scorer.tokenizer
        # The transformers tokenizer, if any, has features that others lack, mainly chat templates.
        self.tokenizer = getattr(self.text_tokenizer, "transformers_tokenizer", None)
        self.backend = "seq2seq" if family.context_reader == "encoder" else "causal"
        self.max_length = max_length or model.positions.max_position_embeddings
        self._device = scorer.engine.device
        self._prefix_token_id, self.ends = prefix_token_id, ends
        self._encode = functools.lru_cache(maxsize=256)(self._encode_new)

    @property
    def eot_token_id(self) -> int:
        """End-of-text token, or else end-of-document token. Raises ValueError without either."""
        ids = self.text_tokenizer.special_ids
        return self.text_tokenizer.eod if ids.eos is None else ids.eos

    @property
    def prefix_token_id(self) -> int:
        """Token that is prepended to a text without context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = self.text_tokenizer.special_ids.bos
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in lm-eval's prompt caches."""
        return self.text_tokenizer.source.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text. By default they include the special tokens that the
        tokenizer adds around a text, unless the text already begins with the prefix token."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix_text)
        return list(self._encode(string, add_special_tokens))

    @functools.cached_property
    def _prefix_text(self) -> str:
        return self.text_tokenizer.detokenize([self.prefix_token_id])

    @functools.cached_property
    def _around_text(self) -> int:
        """Number of beginning-of-text tokens, 0 or 1, that even an untemplated text gets."""
        whole, bare = (
            encode("a") for encode in (self.text_tokenizer.tokenize, self._without_template)
        )
        begin = self.text_tokenizer.special_ids.bos
        return int(list(whole) == list(bare) and len(whole) > 1 and whole[0] == begin)

    def _without_template(self, text: str) -> Sequence[int]:
        return self.text_tokenizer.tokenize_sentences([text])[0].tolist()

    def _encode_new(self, text: str, template: bool) -> tuple[int, ...]:
        if template:
            return tuple(self.text_tokenizer.tokenize(text))
        return tuple(self._without_template(text)[self._around_text :])

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return, for each request, the log-probability of its continuation after its context, and
        whether greedy decoding would produce the continuation. Raises ConfigError if a continuation
        is empty."""
        for request in requests:
            if not request.args[1]:
                raise ConfigError(
                    f"task {request.task_name}: document {request.doc_id} has an empty "
                    "continuation (doc_to_target, doc_to_choice)"
                )

        def compute(missing: list[Instance]) -> list[tuple[float, bool]]:
            return super(HarnessModel, self).loglikelihood(missing, disable_tqdm=True)

        if self.writer is None or not self.one_prompt:
            return self._kept("loglikelihood", requests, compute)
        shared = [request for request in requests if request.task_name in self.one_prompt]
        rest = [request for request in requests if request.task_name not in self.one_prompt]
        after = iter(self._kept("loglikelihood", shared, self._after_one_prompt))
        others = iter(self._kept("loglikelihood", rest, compute) if rest else ())
        chosen = (after if r.task_name in self.one_prompt else others for r in requests)
        return [next(answers) for answers in chosen]

    def _after_one_prompt(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the answers to requests with few distinct contexts, computing each context only
        once. Requests with the same context must be consecutive."""
        assert self.writer is not None
        answers: list[tuple[float, bool]] = []
        start = time.perf_counter()
        bar = progress_bar("prompts", total=len(requests), unit=" requests")
        with bar:
            for context, group in itertools.groupby(requests, key=lambda r: r.args[0]):
                # The tokens at the boundary depend only on the nearby text. So only the end of a
                # long context is tokenized with each continuation.
                near = context[-_NEAR:]
                rests = [self._encode_pair(near, request.args[1])[1] for request in group]
                longest = max(map(len, rests))
                prompt = self.tok_encode(context)[-(self.max_length - longest + 1) :]
                answers += [
                    (log_prob, greedy)
                    for log_prob, greedy in prefix_likelihoods(self.writer, prompt, rests)
                ]
                self.scorer.speed.add(len(rests), len(prompt) + sum(map(len, rests)), 0.0)
                bar.update(len(rests))
        self.scorer.speed.add(0, 0, time.perf_counter() - start)
        return answers

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the token ids of context and continuation, which a `TokenText` already has."""
        if isinstance(context, TokenText) and isinstance(continuation, TokenText):
            return context.tokens, continuation.tokens
        return super()._encode_pair(context, continuation)  # type: ignore[no-any-return]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text. Long texts are scored in windows of the
        model's length; each token is scored once."""
        return self._kept("loglikelihood_rolling", requests, self._rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates after each context. Raises ConfigError if
        this model was opened without generation, or if a task's generation settings are not
        supported."""
        # Only deterministic texts are cached: a sampled text differs each time.
        again = [request for request in requests if not _is_drawn(request)]
        texts = iter(self._kept("generate_until", again, self._written))
        others = iter(self._written([request for request in requests if _is_drawn(request)]))
        return [next(others if _is_drawn(request) else texts) for request in requests]

    def _written(self, requests: Sequence[Instance]) -> list[str]:
        if not requests:
            return []
        if self.writer is None:
            names = sorted({str(request.task_name) for request in requests})
            raise ConfigError(
                f"task {', '.join(names)} generates text (output_type: generate_until), which a "
                "training does not do: run tools/evaluate.py with its checkpoint"
            )
        seed = torch.initial_seed()
        texts = [
            self._generation(request, derive_seed(seed, number))
            for number, request in enumerate(requests)
        ]

        def answer(number: int, completion: Completion) -> str:
            written = self._decoded(completion.tokens)
            return postprocess_generated_text(written, list(texts[number].stopping.texts), None)

        def keep(number: int, completion: Completion) -> None:
            if self.answer_cache is not None and not _is_drawn(requests[number]):
                answers = [(requests[number].args, answer(number, completion))]
                self.answer_cache.add("generate_until", answers)

        start = time.perf_counter()
        completions = self.writer.completions(texts, keep)
        tokens = sum(len(each.prompt) for each in texts) + sum(
            len(each.tokens) for each in completions
        )
        self.scorer.speed.add(len(requests), tokens, time.perf_counter() - start)
        return [answer(number, completion) for number, completion in enumerate(completions)]

    def _generation(self, request: Instance, seed: int) -> GenerationRequest:
        """Return a generation request. A context that does not fit is truncated on the left."""
        task, ids = str(request.task_name), self.text_tokenizer.special_ids
        texts = [self.text_tokenizer.detokenize([i]) for i in (ids.eod, ids.eos) if i is not None]
        rules = generation_rules(request.args[1], self.ends, texts, task, seed)
        new = rules[0].max_new_tokens
        room = self.max_length - (new if self.backend == "causal" else 0)
        if room <= 0:
            raise ConfigError(
                f"task {task}: max_gen_toks {new} leaves no room for a prompt in the "
                f"{self.max_length} tokens that the model sees; --gen-kwargs max_gen_toks=N"
            )
        return GenerationRequest(tuple(self.tok_encode(request.args[0]))[-room:], *rules)

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of new tokens, without special tokens."""
        ids = self.text_tokenizer.special_ids
        special = {ids.cls, ids.sep, ids.pad, ids.mask, ids.bos, ids.eos, ids.eod}
        if self.tokenizer is not None:
            return self.tokenizer.decode(tokens, skip_special_tokens=True)
        return self.text_tokenizer.detokenize([i for i in tokens if i not in special])

    def _rolling(self, requests: Sequence[Instance]) -> list[float]:
        windows: list[EncodedPair] = []
        ends = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        log_probs = [log_prob for log_prob, _ in self._loglikelihood_tokens(windows)]
        return [float(sum(log_probs[start:end])) for start, end in pairwise([0, *ends])]

    def _loglikelihood_tokens(
        self, requests: Sequence[EncodedPair], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]

        def keep(answers: Sequence[tuple[int, Likelihood]]) -> None:
            if self.answer_cache is not None:
                texts = [(requests[number][0], tuple(answer)) for number, answer in answers]
                known = [(text, answer) for text, answer in texts if text is not None]
                self.answer_cache.add("loglikelihood", known)

        shortened = sum(
            len(pair.context) < len(context)
            for pair, (_, context, _) in zip(pairs, requests, strict=True)
        )
        if shortened and is_main_process():
            logger.warning(
                f"{shortened} of {len(pairs)} requests are longer than {self.max_length} tokens, "
                "and lose the beginning of their context"
            )
        start = time.perf_counter()
        likelihoods = self.scorer.answers(pairs, self.backend == "causal", keep)
        tokens = sum(len(context) + len(rest) for context, rest in pairs)
        self.scorer.speed.add(len(pairs), tokens, time.perf_counter() - start)
        return [(log_prob, greedy) for log_prob, greedy in likelihoods]

    def _cut(self, context: list[int], continuation: list[int]) -> TokenRequest:
        """Truncate the context on the left so that the request fits the model's length. Raises
        ConfigError if the continuation alone does not fit or is empty."""
        if len(continuation) > self.max_length:
            raise ConfigError(
                f"a continuation of {len(continuation)} tokens does not fit into the "
                f"{self.max_length} that the model sees (--max-length)"
            )
        if not continuation:
            raise ConfigError(
                "a continuation has no token of its own: the tokenizer joins it with its context "
                "(doc_to_target, doc_to_choice, target_delimiter)"
            )
        if self.backend != "causal":
            return TokenRequest(context[-self.max_length :], continuation)
        too_many = max(0, len(context) + len(continuation) - self.max_length - 1)
        return TokenRequest(context[too_many:], continuation)

    def _kept(
        self, method: str, requests: list[Instance], compute: Callable[[list[Instance]], list[Any]]
    ) -> list[Any]:
        """Return the answers to requests, computing only those that are not cached."""
        if self.answer_cache is None:
            return compute(requests)
        cached = self.answer_cache.find(method, [request.args for request in requests])
        pairs = zip(requests, cached, strict=True)
        missing = [request for request, answer in pairs if answer is None]
        computed = compute(missing) if missing else []
        arguments = [request.args for request in missing]
        self.answer_cache.add(method, list(zip(arguments, computed, strict=True)))
        rest = iter(computed)
        return [next(rest) if answer is None else answer for answer in cached]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Format a conversation with the tokenizer's chat template, dropping system messages if the
        template rejects them. Raises ConfigError if the tokenizer has no chat template."""
        self._require_chat_template()
        messages, tag = list(chat_history), ""
        if not add_generation_prompt and messages:  # The model is to continue the last message.
            tag = _CONTINUED
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + tag}
        try:
            text = self._chat_format.render(messages, add_generation_prompt)
        except TemplateRefusalError as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            logger.warning(f"{error}; system messages are left out")
            text = self._chat_format.render(others, add_generation_prompt)
        if not tag:
            return text
        kept, template, _ = text.rpartition(tag.strip())
        if not template:
            raise ValueError("the chat template leaves out the message that is to be continued")
        # A template that strips messages has also removed the marker's final space.
        return kept if text[len(kept) :].startswith(tag) else kept.rstrip()

    @functools.cached_property
    def _chat_format(self) -> ChatFormat:
        return ChatFormat.of(self.text_tokenizer)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template, which lm-eval records in its results."""
        if chat_template is not False:
            self._require_chat_template()
        return super().chat_template(chat_template)

    def _require_chat_template(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"--apply-chat-template: {self.text_tokenizer.source} has no chat template; a "
                "Hugging Face folder with one, as --tokenizer-type HFTokenizer --tokenizer-model "
                "FOLDER, has"
            )

    def get_model_info(self) -> dict[str, Any]:
        """Return the model information that lm-eval writes into its results."""
        engine = self.scorer.engine
        return {"model_dtype": str(next(engine.model.parameters()).dtype).removeprefix("torch.")}


def _is_drawn(request: Instance) -> bool:
    return bool(request.args[1].get("do_sample"))
