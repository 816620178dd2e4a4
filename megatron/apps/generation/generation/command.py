"""Command-line program that generates text with a checkpoint, on a terminal or to a file."""

from __future__ import annotations

import errno
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.apps.generation.decoding.chat import ChatFormat
from megatron.apps.generation.decoding.text_stream import TextStream, continuation_text
from megatron.apps.generation.generation.config import GenerateConfig, prompts_of, unused_flags
from megatron.apps.generation.opening import opened_runner
from megatron.apps.generation.request import (
    Completion,
    GenerationRequest,
    Runner,
    StopRules,
    prompt_tokens,
)
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.checkpoint.source import tokenizer_in
from megatron.config import ConfigError, Setting, Settings
from megatron.config.output import check_output
from megatron.data.samples import NeighborText, Piece
from megatron.parallel.random import derive_seed
from megatron.run.run import RunToolParser, start_processes
from megatron.util.errors import one_line
from megatron.util.files import replacing, sync
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

PROMPT = "Context prompt (stop to exit) >>> "
CHAT_PROMPT = "Message (stop to exit) >>> "
Message = dict[str, str]
Row = dict[str, Any]
Tokens = tuple[int, ...]
Sources = Callable[[Sequence[int]], Sequence[NeighborText]]
"""Function that returns the retrieved texts that a model reads along with the given tokens."""


def run_generation(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run text generation with the given command-line arguments, on all ranks of its layout. Raises
    ValueError or OSError, naming the cause, if a flag, a file or a checkpoint cannot be used."""
    options, settings = RunToolParser(GenerateConfig, description).parse(argv)
    texts = None
    if is_main_process():
        texts = prompts_of(options)
        for flag, path in options.outputs.items():
            check_output(flag, path)
    processes = start_processes(settings, argv)
    if is_main_process():
        for line in unused_flags(options):
            say(line)
        if options.num_samples == 0 and options.genfile is not None:
            say(
                f"--num-samples 0: nothing is sampled without a prompt; --genfile "
                f"{options.genfile} is not written"
            )
    of_run = _of_run(options, settings)
    with opened_runner(of_run, processes, options, options.adapter, options.retro) as opened:
        if opened is None:  # a follower rank, which has already run its part of every step
            return
        runner: Runner = opened.runner
        sources: Sources | None = None
        if options.retro:
            from megatron.apps.retro.generation import with_retrieval

            assert options.retro_project_dir is not None
            runner, sources = with_retrieval(opened, options.retro_project_dir)
        running, drafts = options.micro_batch_size, options.num_speculative_tokens
        step_tokens = EngineLimits.step_tokens + running * drafts
        limits = EngineLimits(running, step_tokens, drafts=drafts)
        engine = GenerationEngine(runner, opened.tokenizer, limits)
        chat = None
        if options.chat:
            chat = ChatFormat.of(opened.tokenizer, tokenizer_in(opened.folder) or opened.folder)
            if not chat.templates:
                raise ConfigError(
                    f"--chat: the tokenizer of {opened.folder} has no chat template; name an "
                    "instruct model, or leave --chat out"
                )
        generator = TextGenerator(engine, options, opened.ends, sources, chat)
        try:
            _generate(generator, options, texts)
        except KeyboardInterrupt:
            print()
            sys.exit(130)
        finally:
            if chat is not None:
                chat.close()


def _of_run(options: GenerateConfig, settings: Settings) -> Settings:
    """Return the settings of the run to load, updated by the flags that select the checkpoint."""
    of_run = settings | {"load": Setting(options.load, "flag --load")}
    if options.iteration is None:
        return of_run
    if "load_tag" in settings:
        raise ConfigError(
            f"--iteration {options.iteration} and --load-tag {settings['load_tag'].value}: give "
            "one of them"
        )
    return of_run | {"load_tag": Setting(str(options.iteration), "flag --iteration")}


def _generate(generator: TextGenerator, options: GenerateConfig, texts: list[str] | None) -> None:
    samples = options.num_samples or 1
    if texts is None:
        generator.interact(samples)
    elif options.genfile is not None or options.sample_input_file is not None:
        chosen = texts[: options.num_samples or None]
        if options.num_samples is not None and options.num_samples > len(texts):
            say(f"--sample-input-file {options.sample_input_file} has {len(texts)} prompts")
        _write(options, generator.megatron_rows(chosen), len(chosen))
    elif options.output is not None:
        _write(options, generator.rows(texts, samples), len(texts) * samples)
    else:
        generator.show(texts, samples)


def _write(options: GenerateConfig, rows: Iterable[Row], total: int) -> None:
    """Write rows as JSON lines. The file appears only when it is complete."""
    (path,) = map(Path, options.outputs.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("x", encoding="utf-8") as file:
        for row in progress_bar("generating", rows, total, " texts"):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        sync(file)
    say(f"{path}: {total} texts")


class TextGenerator:
    """Generator that continues texts up to a number of new tokens or one of the tokens ``ends``.
    All texts use the runner's first adapter. The seed and the prompt's index determine its random
    numbers. With ``sources`` each text is accompanied by the retrieved texts that the model has
    read. With ``chat`` prompts are messages that the model answers."""

    def __init__(
        self,
        engine: GenerationEngine,
        options: GenerateConfig,
        ends: frozenset[int],
        sources: Sources | None,
        chat: ChatFormat | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._sources = engine, engine.tokenizer, sources
        self._sampling = options.sampling()
        self._chat, self._ends = chat, ends
        self._new = options.max_new_tokens or (128 if chat is None else None)
        self._adapter = next(iter(engine.runner.adapters), None)

    def interact(self, samples: int) -> None:
        """Continue one input line after another, or hold a conversation, until the line "stop" or
        the end of the input."""
        messages: list[Message] = []
        for number in itertools.count():
            try:
                text = input(PROMPT if self._chat is None else CHAT_PROMPT)
            except EOFError:
                print()
                return
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                # A launcher may start processes in a new session, which cannot read the terminal.
                raise ConfigError(
                    "the launcher does not let this program read the terminal: start it as "
                    "cat | torchrun ..., or give --prompt or --prompt-file"
                ) from None
            if text.strip() == "stop":
                return
            try:
                if self._chat is None:
                    # The line's number gives a repeated line a different seed.
                    self.show([text], samples, number)
                    continue
                asked = [*messages, {"role": "user", "content": text}]
                answer = self._stream(self._encode(asked), number, 0)
                messages = [*asked, {"role": "assistant", "content": answer}]
            except ValueError as error:
                print(f"error: {one_line(error)}", file=sys.stderr)

    def show(self, texts: Sequence[str], samples: int, *place: int) -> None:
        """Generate and print the texts. A single text is streamed while it is generated."""
        if len(texts) * samples > 1:
            for row in self.rows(texts, samples, *place):
                read = "".join(f"\n{line}" for line in _shown(row))
                between = "" if self._chat is None else "\n"
                say(f"{row['prompt']}{between}{row['text']}{read}\n{'-' * 8}")
            return
        prompt = self._encode(texts[0])
        if self._chat is None:
            print(texts[0], end="", flush=True)
        self._stream(prompt, *place, 0)

    def _stream(self, prompt: Tokens, *place: int) -> str:
        """Generate a text, printing it as it grows, and return it."""
        written: list[str] = []

        def write(text: str, end: str = "") -> None:
            written.append(text)
            print(text, end=end, flush=True)

        number = self._engine.submit(self._request(prompt, *place))
        text = TextStream(self._tokenizer, self._before(prompt))
        finish, added = None, list[int]()
        while finish is None:
            for update in self._engine.step():
                assert update.number == number
                if update.error is not None:
                    raise update.error
                finish = update.finish
                added += update.tokens
                tokens = update.tokens[:-1] if finish == "stop" else update.tokens
                write("".join(map(text.add, tokens)))
        write(text.close(), "\n")
        for line in _shown(self._neighbors((*prompt, *added))):
            print(line)
        return "".join(written)

    def rows(self, texts: Sequence[str], samples: int, *place: int) -> Iterator[Row]:
        """Yield a row for each sample of each prompt."""
        prompts = [self._encode(text) for text in texts]
        prompts = [prompt for prompt in prompts for _ in range(samples)]
        for number, (prompt, completion) in enumerate(self._completions(prompts, *place)):
            ended, before = completion.finish == "stop", self._before(prompt)
            tokens = completion.tokens[:-1] if ended else completion.tokens
            yield {
                "prompt": texts[number // samples],
                "sample": number % samples,
                "text": continuation_text(self._tokenizer, before, tokens),
                "tokens": tokens,
                "ended": ended,
                **self._neighbors((*before, *completion.tokens)),
            }

    def megatron_rows(self, texts: Sequence[str]) -> Iterator[Row]:
        """Yield a row for each prompt, with the fields of Megatron's generate_samples_gpt.py. As
        there, the text includes the end token, and a new document begins with one."""
        prompts = [self._encode(text) for text in texts]
        for number, (prompt, completion) in enumerate(self._completions(prompts)):
            before = self._before(prompt)
            written = continuation_text(self._tokenizer, before, completion.tokens)
            whole = self._tokenizer.detokenize(before) + written
            yield {
                "text": written if texts[number] else whole,
                "all_text": whole,
                "prompt": texts[number],
                "id": number,
                **self._neighbors((*before, *completion.tokens)),
            }

    def _encode(self, text: str | Sequence[Message]) -> Tokens:
        """Return the token ids of a prompt or of messages. Raises ValueError if the prompt is too
        long or leaves no room for the new tokens."""
        runner, new = self._engine.runner, self._new or 1
        if self._chat is None:
            assert isinstance(text, str)
            prompt = prompt_tokens(self._tokenizer, text, runner)
        else:
            messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
            prompt = self._chat.prompt(self._tokenizer, messages, runner)
        if runner.max_prompt is not None and len(prompt) > runner.max_prompt:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens is longer than the {runner.max_prompt} that the "
                "encoder reads: shorten the prompt"
            )
        before, room = self._room(prompt)
        if new > room:
            advice = f"at most --max-new-tokens {room}" if room > 0 else "shorten the prompt"
            raise ValueError(
                f"--max-new-tokens {new} after a prompt of {before} tokens is more than the "
                f"model's {runner.max_positions} positions (--max-position-embeddings): {advice}"
            )
        return prompt

    def _room(self, prompt: Tokens) -> tuple[int, int]:
        """Return the number of prompt tokens in the sequence, and the maximum number of new tokens.
        With an encoder the sequence contains only the start token."""
        runner = self._engine.runner
        before = len(prompt) if runner.max_prompt is None else 1
        return before, runner.max_positions - before

    def _before(self, prompt: Tokens) -> Tokens:
        """Return the tokens that the new text continues: the prompt unless an encoder reads it."""
        return prompt if self._engine.runner.max_prompt is None else ()

    def _request(self, prompt: Tokens, *place: int) -> GenerationRequest:
        """Return the request for a prompt. Its seed is derived from the indices ``place``."""
        sampling = replace(self._sampling, seed=derive_seed(self._sampling.seed, *place))
        stopping = StopRules(self._new or self._room(prompt)[1], self._ends)
        return GenerationRequest(prompt, stopping, sampling, adapter=self._adapter)

    def _completions(
        self, prompts: Sequence[Tokens], *place: int
    ) -> Iterator[tuple[Tokens, Completion]]:
        requests = (self._request(prompt, *place, n) for n, prompt in enumerate(prompts))
        return zip(prompts, self._engine.completions(requests), strict=True)

    def _neighbors(self, tokens: Sequence[int]) -> Row:
        """Return the retrieved texts that the model has read with these tokens, as row fields."""
        if self._sources is None:
            return {}
        read = self._sources(tokens)
        return {"neighbors": [each._asdict() | {"piece": each.piece._asdict()} for each in read]}


def _shown(row: Row) -> Iterator[str]:
    for each in row.get("neighbors", []):
        piece = Piece(**each["piece"])
        place = f"document {piece.sequence}, tokens {piece.start} to {piece.stop - 1}"
        yield f"  {each['name']}: {piece.source}: {place}"
        yield from (f"    | {line}" for line in each["text"].splitlines())
