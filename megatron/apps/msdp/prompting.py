"""Program that generates knowledge and answers by prompting, and computes F1 scores."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from statistics import fmean

from megatron.apps.generation.decoding.text_stream import continuation_text
from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.opening import for_generation, runner_of
from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules, prompt_tokens
from megatron.apps.generation.writing import TextWriter
from megatron.apps.msdp.dialogues import (
    END_OF_TEXT,
    NO_KNOWLEDGE,
    DialogueLine,
    read_lines,
    read_turns,
    response_prompt,
    words,
    write_lines,
)
from megatron.config import ConfigError, Settings
from megatron.config.flags import POSITIVE, option
from megatron.config.output import check_output
from megatron.features.evaluation.checkpoints import opened_checkpoint
from megatron.formats.conversion.commands import required
from megatron.run.run import RunToolParser, start_processes
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

PROMPT, F1 = "MSDP-PROMPT", "MSDP-EVAL-F1"
KNOWLEDGE, RESPONSE = "knowledge", "response"
_PUNCTUATION = re.compile(r'[!"#$%&()*+,-./:;<=>?@\[\]\\^`{|}~_\']')
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class MsdpConfig(CacheConfig):
    """Dialogue prompting: the task, and its files."""

    task: str | None = option(None)
    """Task: MSDP-PROMPT generates knowledge or answers, MSDP-EVAL-F1 computes their F1 score."""
    prompt_type: str | None = option(None, choices=(KNOWLEDGE, RESPONSE))
    """MSDP-PROMPT: kind of text to generate."""
    prompt_file: str | None = option(None)
    """MSDP-PROMPT: file of examples written by tasks/msdp/preprocessing.py."""
    num_prompt_examples: int = option(10, bounds=POSITIVE)
    """MSDP-PROMPT: maximum number of examples in the prompt."""
    sample_input_file: str | None = option(None)
    """MSDP-PROMPT: file of dialogue lines."""
    sample_output_file: str | None = option(None, derived="that of --sample-input-file with .out")
    """MSDP-PROMPT: output file, with one line for each dialogue."""
    out_seq_length: int = option(100, bounds=POSITIVE)
    """MSDP-PROMPT: maximum number of generated tokens."""
    api_prompt: bool = option(False)
    """MSDP-PROMPT: use the server at --megatron-api-url instead of a checkpoint."""
    megatron_api_url: str | None = option(None)
    """MSDP-PROMPT: URL of tools/run_text_generation_server.py, such as http://host:5000/api."""
    guess_file: str | None = option(None)
    """MSDP-EVAL-F1: file of generated texts."""
    answer_file: str | None = option(None)
    """MSDP-EVAL-F1: file of reference texts, one line for each generated text."""


def run_msdp(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run the task that a command line selects. Raises ValueError or OSError, naming the flag, file
    or checkpoint that cannot be used."""
    config, settings = RunToolParser(MsdpConfig, description).parse(argv)
    if config.task == F1:
        _evaluate(config)
    elif config.task == PROMPT:
        _prompt(config, settings, argv)
    else:
        raise ConfigError(f"--task {config.task}: the tasks are {PROMPT}, {F1}")


def _evaluate(config: MsdpConfig) -> None:
    guesses = read_lines("--guess-file", required(config, "guess_file"))
    answers = read_lines("--answer-file", required(config, "answer_file"))
    if len(guesses) != len(answers):
        raise ConfigError(
            f"--guess-file {config.guess_file} has {len(guesses)} lines, and --answer-file "
            f"{config.answer_file} {len(answers)}: both are of the same dialogues"
        )
    guesses = [guess.replace(END_OF_TEXT, "") for guess in guesses]
    answers = ["" if answer == NO_KNOWLEDGE else answer for answer in answers]
    scores = mean_f1(guesses, answers)
    if is_main_process():
        say("Precision: {:.4f}; recall: {:.4f}; f1: {:.4f}".format(*scores))


def mean_f1(guesses: Sequence[str], answers: Sequence[str]) -> tuple[float, float, float]:
    """Return the mean precision, recall and F1 over all pairs whose answer is not empty. Raises
    ConfigError if all answers are empty."""
    pairs = [(g, a) for g, a in zip(guesses, answers, strict=True) if a]
    if not pairs:
        raise ConfigError(f"--answer-file: every line is empty or {NO_KNOWLEDGE}")
    precision, recall, f1 = zip(*(word_f1(*pair) for pair in pairs), strict=True)
    return fmean(precision), fmean(recall), fmean(f1)


def word_f1(guess: str, answer: str) -> tuple[float, float, float]:
    """Return precision, recall and F1 of the words in ``guess`` against ``answer``, as multisets,
    in lower case and without punctuation and articles (Rajpurkar et al. 2016, arXiv:1606.05250)."""
    guessed, right = (
        _ARTICLES.sub(" ", _PUNCTUATION.sub(" ", text.lower())).split() for text in (guess, answer)
    )
    same = (Counter(guessed) & Counter(right)).total()
    if not same:
        return 0.0, 0.0, 0.0
    precision, recall = same / len(guessed), same / len(right)
    return precision, recall, 2 * precision * recall / (precision + recall)


def prompts_of(config: MsdpConfig) -> list[str]:
    """Return the prompt for each line of ``--sample-input-file``: the examples, one per line,
    followed by the question. Raises ConfigError if examples are missing."""
    path, kind = required(config, "prompt_file"), required(config, "prompt_type")
    turns = read_turns("--sample-input-file", required(config, "sample_input_file"))
    count, lines = config.num_prompt_examples, read_lines("--prompt-file", path)
    if kind == RESPONSE:
        if len(lines) < count:
            raise ConfigError(
                f"--num-prompt-examples {count}: --prompt-file {path} has {len(lines)}"
            )
        before = "".join(f"{line} \n" for line in lines[:count])
        return [before + response_prompt(turn) for turn in turns]
    examples = dict[str, list[str]]()
    for number, line in enumerate(lines, 1):
        content = parse_json(line, f"--prompt-file {path}, line {number}")
        lists = content.values() if isinstance(content, dict) else [None]
        if not all(isinstance(v, list) and all(isinstance(e, str) for e in v) for v in lists):
            raise ConfigError(
                f"--prompt-file {path}, line {number}: expected an object with a list of texts"
            )
        # If several lines have the same key, the first one takes precedence.
        examples = {**content, **examples}
    return [_knowledge_prompt(turn, examples, count, path) for turn in turns]


def _knowledge_prompt(
    turn: DialogueLine, examples: dict[str, list[str]], count: int, path: str
) -> str:
    if turn.key not in examples:
        raise ConfigError(
            f"--prompt-file {path} has no examples for {turn.key!r}: it was made of another file "
            "than --sample-input-file"
        )
    # The last example has the most similar dialogue.
    before = "".join(f"{example.strip()} \n" for example in examples[turn.key][-count:])
    return f"{before}( {turn.turns[-1]} ) {turn.topic} =>"


def _prompt(config: MsdpConfig, settings: Settings, argv: Sequence[str] | None) -> None:
    output = config.sample_output_file or f"{required(config, 'sample_input_file')}.out"
    check_output("--sample-output-file", output)
    prompts = prompts_of(config)
    if config.api_prompt:
        texts = list(progress_bar("generating", _asked(config, prompts), len(prompts)))
    else:
        texts = _generated(config, for_generation(settings), prompts, argv)
    if is_main_process():
        lines = [text.partition("\n")[0].strip() for text in texts]
        if config.prompt_type == RESPONSE:
            lines = [" ".join(words(line)) for line in lines]
        write_lines(output, lines)
        say(f"{output}: {len(lines)} texts")


def _asked(config: MsdpConfig, prompts: Sequence[str]) -> Iterator[str]:
    """Yield the continuation of each prompt, generated by a server."""
    url = required(config, "megatron_api_url")
    for prompt in prompts:
        content = {"prompts": [prompt], "tokens_to_generate": config.out_seq_length, "top_k": 1}
        headers = {"Content-Type": "application/json; charset=UTF-8"}
        try:
            request = urllib.request.Request(
                url, json.dumps(content).encode(), headers, method="PUT"
            )
            with urllib.request.urlopen(request, timeout=600) as answer:
                text = json.load(answer)["text"][0].removeprefix(prompt)
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as e:
            raise ConfigError(
                f"--megatron-api-url {url} does not answer with a continuation: {e!r}"
            ) from None
        yield text


def _generated(
    config: MsdpConfig, settings: Settings, prompts: Sequence[str], argv: Sequence[str] | None
) -> list[str]:
    """Return greedy continuations, each up to the end of a line, by the model in a checkpoint.
    Data-parallel replicas share the prompts."""
    with opened_checkpoint(settings, start_processes(settings, argv), PROMPT) as opened:
        tokenizer, mesh = opened.run.tokenizer, opened.engine.mesh
        runner = runner_of(opened.engine, tokenizer, config)
        stopping = StopRules(config.out_seq_length, opened.ends, ("\n",))
        tokens = [prompt_tokens(tokenizer, prompt, runner) for prompt in prompts]
        longest, room = max(map(len, tokens)), runner.max_positions - config.out_seq_length
        if runner.max_prompt is None and longest > room:
            raise ConfigError(
                f"a prompt of {longest} tokens and --out-seq-length {config.out_seq_length} are "
                f"more than the model's {runner.max_positions} positions: give fewer "
                "--num-prompt-examples"
            )
        requests = [GenerationRequest(each, stopping, Sampling(greedy=True)) for each in tokens]
        completions = TextWriter(mesh, tokenizer, runner).completions(requests)
    texts = []
    for prompt, completion in zip(tokens, completions, strict=True):
        before = prompt if runner.max_prompt is None else ()
        texts.append(continuation_text(tokenizer, before, completion.tokens))
    return [text.replace(END_OF_TEXT, "") for text in texts]
