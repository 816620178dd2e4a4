"""Text of a checkpoint's model on a terminal or in files, from a command line."""

from __future__ import annotations

import errno
import itertools
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.apps.generation.generation.config import GenerateConfig, unused_flags
from megatron.apps.generation.generation.prompt_files import prompts_of
from megatron.apps.generation.generation.text_generator import TextGenerator, Tokens
from megatron.apps.generation.opening import opened_runner
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.generation.step import Runner
from megatron.config import ConfigError, Setting, Settings
from megatron.data.samples import NeighborText, Piece
from megatron.run.folders import check_output
from megatron.run.launch import start_processes
from megatron.run.run import RunToolParser
from megatron.util.errors import one_line
from megatron.util.files import replacing, sync
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

PROMPT = "Context prompt (stop to exit) >>> "
Row = dict[str, Any]
Sources = Callable[[Sequence[int]], Sequence[NeighborText]]
"""What a model that retrieves has read beside the tokens of a text."""
RETRIEVAL = "megatron.apps.retro.generation:with_retrieval"
"""Imported for --retro."""


def run_generation(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Generates what a command line asks for, on all ranks of its layout. Raises ValueError or
    OSError if a flag, a file or a checkpoint cannot be used; the message names it."""
    options, settings = RunToolParser(GenerateConfig, description).parse(argv)
    texts = None
    if is_main_process():
        texts = prompts_of(options)
        for flag, path in options.outputs.items():
            check_output(flag, path)
    processes = start_processes(settings, argv)
    for line in unused_flags(options) if is_main_process() else ():
        say(line)
    if options.num_samples == 0 and options.genfile is not None and is_main_process():
        say(
            f"--num-samples 0: nothing is sampled without a prompt; --genfile {options.genfile} is "
            "not written"
        )
    of_run = _of_run(options, settings)
    with opened_runner(of_run, processes, options, options.adapter, options.retro) as opened:
        if opened is None:  # the others compute what the main rank asks for
            return
        limits = EngineLimits(running=options.micro_batch_size)
        runner: Runner = opened.runner
        sources: Sources | None = None
        if options.retro:
            runner, sources = resolve_name(RETRIEVAL)(opened, options.retro_project_dir)
        engine = GenerationEngine(runner, opened.tokenizer, limits)
        generator = TextGenerator(
            engine, opened.tokenizer, options.max_new_tokens, options.sampling(),
            opened.ends, next(iter(opened.runner.adapters), None),
        )  # fmt: skip
        try:
            _generate(generator, options, texts, sources)
        except KeyboardInterrupt:
            print()
            sys.exit(130)


def _of_run(options: GenerateConfig, settings: Settings) -> Settings:
    """The settings of the run that has the model."""
    found = settings | {"load": Setting(options.load, "flag --load")}
    if options.iteration is None:
        return found
    if "load_tag" in settings:
        raise ConfigError(
            f"--iteration {options.iteration} and --load-tag {settings['load_tag'].value}: give "
            "one of them"
        )
    return found | {"load_tag": Setting(str(options.iteration), "flag --iteration")}


def _generate(
    generator: TextGenerator,
    options: GenerateConfig,
    texts: list[str] | None,
    sources: Sources | None,
) -> None:
    if texts is None:
        interact(generator, options.num_samples or 1, sources)
    elif options.genfile is not None or options.sample_input_file is not None:
        wanted = texts[: options.num_samples or None]
        if options.num_samples is not None and options.num_samples > len(texts):
            say(f"--sample-input-file {options.sample_input_file} has {len(texts)} prompts")
        write(options, megatron_rows(generator, wanted, sources), len(wanted))
    elif options.output is not None:
        count = options.num_samples or 1
        write(options, rows(generator, texts, count, sources=sources), len(texts) * count)
    else:
        show(generator, texts, options.num_samples or 1, sources=sources)


def interact(generator: TextGenerator, samples: int, sources: Sources | None = None) -> None:
    """Continues one line after another until the line "stop" or the end of the input."""
    for number in itertools.count():
        try:
            text = input(PROMPT)
        except EOFError:
            print()
            return
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # A process that a launcher has put into a session of its own may not read a terminal.
            raise ConfigError(
                "the launcher does not let this program read the terminal: start it as "
                "cat | torchrun ..., or give --prompt or --prompt-file"
            ) from None
        if text.strip() == "stop":
            return
        try:
            # A line that comes again gets another text.
            show(generator, [text], samples, number, sources=sources)
        except ValueError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)


def show(
    generator: TextGenerator,
    texts: Sequence[str],
    samples: int,
    *place: int,
    sources: Sources | None = None,
) -> None:
    """Prints all texts, a single one while it is generated; each with what the model has read
    beside it."""
    if len(texts) * samples > 1:
        for row in rows(generator, texts, samples, *place, sources=sources):
            read = "".join(f"\n{line}" for line in _shown(row.get("neighbors", [])))
            say(f"{row['prompt']}{row['text']}{read}\n{'-' * 8}")
        return
    prompt = generator.encode(texts[0])
    print(texts[0], end="", flush=True)
    tokens = _printed(generator.stream(prompt, *place, 0))
    print()
    for line in _shown(_neighbors(sources, (*prompt, *tokens)).get("neighbors", [])):
        print(line)


def _printed(pieces: Generator[str, None, Tokens]) -> Tokens:
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            tokens: Tokens = end.value
            return tokens


def _neighbors(sources: Sources | None, tokens: Sequence[int]) -> Row:
    """What the model has read beside a text, as a part of its row."""
    if sources is None:
        return {}
    read = [each._asdict() | {"piece": each.piece._asdict()} for each in sources(tokens)]
    return {"neighbors": read}


def _shown(neighbors: Sequence[Row]) -> Iterator[str]:
    for each in neighbors:
        piece = Piece(**each["piece"])
        place = f"document {piece.sequence}, tokens {piece.start} to {piece.stop - 1}"
        yield f"  {each['name']}: {piece.source}: {place}"
        yield from (f"    | {line}" for line in each["text"].splitlines())


def write(options: GenerateConfig, found: Iterable[Row], total: int) -> None:
    """Writes rows as JSON lines; the file appears when it is complete."""
    (path,) = map(Path, options.outputs.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("x", encoding="utf-8") as file:
        for row in progress_bar("generating", found, total, " texts"):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        sync(file)
    say(f"{path}: {total} texts")


def rows(
    generator: TextGenerator,
    texts: Sequence[str],
    samples: int,
    *place: int,
    sources: Sources | None = None,
) -> Iterator[Row]:
    """A row for each sample of each prompt."""
    prompts = [generator.encode(text) for text in texts]
    each = [prompt for prompt in prompts for _ in range(samples)]
    for number, found in enumerate(generator.continuations(each, *place)):
        yield {
            "prompt": texts[number // samples],
            "sample": number % samples,
            "text": found.text,
            "tokens": found.tokens,
            "ended": found.ended,
            **_neighbors(sources, found.read),
        }


def megatron_rows(
    generator: TextGenerator, texts: Sequence[str], sources: Sources | None = None
) -> Iterator[Row]:
    """A row for each prompt with the fields of Megatron's generate_samples_gpt.py. Like there, what
    ended a text is part of it, and a new document begins with the token that ends one."""
    prompts = [generator.encode(text) for text in texts]
    for number, found in enumerate(generator.continuations(prompts)):
        whole = found.before + found.written
        text = found.written if texts[number] else whole
        row = {"text": text, "all_text": whole, "prompt": texts[number], "id": number}
        yield row | _neighbors(sources, found.read)
