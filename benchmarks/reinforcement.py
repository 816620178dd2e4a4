#!/usr/bin/env python
"""Trains small models from scratch by a few supervised steps, then by reinforcement learning on
tasks whose answers can be checked, and measures the success before, on the way and after.

    python benchmarks/reinforcement.py --folder runs --tasks addition sorting brackets grammar \
        --seeds 1 2 3

The supervised examples show what an answer looks like, and about one in seven of them is right,
without anything that tells which: that bounds the success before, and more of them would not raise
it. Only rewards say which answers are right. Every stage is a command that is printed; stages whose
result exists are left out. The success is the share of right texts, drawn at temperature 1, among
the 512 of a step, before it trains on them; prompts are drawn with replacement. ``--stale`` runs
everything a second time, with the texts of a step written under the weights of the step before.

- addition: two digits, and their sum. Examples are off by -3 to 3.
- sorting: four digits in order. Examples have them in one of seven orders.
- brackets: two to six opening brackets of four kinds, and what closes them. Four in ten brackets of
  the examples are of another kind.
- grammar: a subject of one or several, and a verb and an object that agree with it: after a noun
  with an s the verb has none, and the other way around. Any of the nine right texts counts.
  Examples have words in any order, with and without an s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
NOUNS, VERBS, OBJECTS = ("dog", "cat", "cow"), ("see", "hear", "like"), ("it", "me", "you")
LAST, PROMPTS = 20, 20_000
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 "
    "--seq-length 32 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type ByteLevelTokenizer "
    "--make-vocab-size-divisible-by 1 --num-workers 0 --prompt-format plain --seed {seed} "
    "--weight-decay 0 --adam-beta2 0.95 --eval-iters 0"
)
SUPERVISED = (
    "--sft --lr 2e-3 --lr-decay-style constant --micro-batch-size 64 --global-batch-size 64 "
    "--train-iters {steps} --data-path {at}/examples.jsonl --save {at}/base --log-interval 10 "
    "--split 100,0,0"
)
REINFORCED = (
    "--rl {algorithm} --beta 0 --num-generations 8 --max-completion-length {length} "
    "--reward-funcs {reward} "
    "--pretrained-checkpoint {at}/base --data-path {at}/prompts.jsonl --split 100,0,0 "
    "--micro-batch-size 512 --global-batch-size 512 --rollout-batch-size 512 "
    "--lr 1e-3 --lr-decay-style linear --min-lr 0 "
    "--train-iters {steps} --log-interval 1 --save-interval 1000000"
)


class Problem(NamedTuple):
    """A task.

    Attributes:
        draw: makes a prompt and its answer.
        example: makes what the supervised examples have instead of the answer.
        supervised: steps on examples.
        steps: of reinforcement learning.
        length: most tokens of a text, a few more than answers have.
        reward: a value of ``--reward-funcs``.
    """

    draw: Callable[[random.Random], tuple[str, str]]
    example: Callable[[random.Random, str], str]
    supervised: int
    steps: int
    length: int
    reward: str = "exact"


def addition(random: random.Random) -> tuple[str, str]:
    """Two digits."""
    first, second = random.randrange(10), random.randrange(10)
    return f"{first}+{second}=", f"{first + second}"


def near_sum(random: random.Random, answer: str) -> str:
    """A number that is off by -3 to 3."""
    return str(abs(int(answer) + random.randrange(-3, 4)))


def sorting(random: random.Random) -> tuple[str, str]:
    """Four digits."""
    digits = random.choices("0123456789", k=4)
    return f"{''.join(digits)}=", "".join(sorted(digits))


ORDERS = ("0123", "1032", "2310", "3201", "0321", "3120", "2103")


def some_order(random: random.Random, answer: str) -> str:
    """The digits in one of seven orders."""
    return "".join(answer[int(place)] for place in random.choice(ORDERS))


def brackets(random: random.Random) -> tuple[str, str]:
    """Two to six opening brackets."""
    opening = random.choices("([{<", k=random.randrange(2, 7))
    return f"{''.join(opening)}=", "".join(CLOSING[each] for each in reversed(opening))


def some_kinds(random: random.Random, answer: str) -> str:
    """As many brackets, of which six in ten are of the right kind."""
    kinds = [*CLOSING.values()]
    others = (random.choice([kind for kind in kinds if kind != each]) for each in answer)
    pairs = zip(answer, others, strict=True)
    return "".join(each if random.random() < 0.6 else other for each, other in pairs)


def grammar(random: random.Random) -> tuple[str, str]:
    """A subject, and one of the nine right continuations."""
    noun, several = random.choice(NOUNS), random.random() < 0.5
    verb, thing = random.choice(VERBS), random.choice(OBJECTS)
    return f"{noun}{'s' * several} ", f"{verb}{'s' * (not several)} {thing}"


def any_words(random: random.Random, answer: str) -> str:
    """Two words, an s after some."""
    words = random.choice(VERBS + OBJECTS), random.choice(VERBS + OBJECTS)
    return " ".join(word + "s" * (word in VERBS and random.random() < 0.5) for word in words)


def agrees(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 for a verb that agrees with the subject, and an object; else 0."""
    rights = {
        several: {
            f"{verb}{'s' * (not several)} {o}" for verb, o in itertools.product(VERBS, OBJECTS)
        }
        for several in (True, False)
    }
    pairs = zip(prompts, completions, strict=True)
    return [float(text in rights[prompt.strip().endswith("s")]) for prompt, text in pairs]


TASKS = {
    "addition": Problem(addition, near_sum, 1000, 300, 4),
    "sorting": Problem(sorting, some_order, 200, 300, 6),
    "brackets": Problem(brackets, some_kinds, 200, 250, 8),
    "grammar": Problem(grammar, any_words, 200, 100, 12, f"{Path(__file__).resolve()}:agrees"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the tasks, and prints a table row of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for all results")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--algorithm", default="grpo", help="value of --rl")
    parser.add_argument("--stale", action="store_true", help="also by texts of the weights before")
    parser.add_argument("--supervised", type=int, help="supervised steps, of every task")
    parser.add_argument("--steps", type=int, help="of reinforcement learning, of every task")
    parser.add_argument("--more", default="", help="further flags of reinforcement learning")
    parser.add_argument("--picture", type=Path, help="file for the curves (.svg, .png)")
    options = parser.parse_args(argv)
    curves: dict[str, dict[str, list[list[float]]]] = {task: {} for task in options.tasks}
    for task, stale in itertools.product(options.tasks, [False, True][: 1 + options.stale]):
        rows = [learn(options, task, seed, stale) for seed in options.seeds]
        name = options.algorithm + ", one step stale" * stale
        curves[task][name] = [row.success for row in rows]
        cells = zip(*(row.cells for row in rows), strict=True)
        print("|", " | ".join((task, name, *map(" / ".join, cells))), "|", flush=True)
    if options.picture is not None:
        draw(curves, options.picture)


class Learning(NamedTuple):
    """A run: the success of each step, and CPU seconds of both stages."""

    success: list[float]
    seconds: float

    @property
    def first(self) -> float:
        """Success of the first steps, whose weights have hardly moved."""
        return self.success[0]

    @property
    def last(self) -> float:
        """Mean success of the last steps."""
        last = self.success[-LAST:]
        return sum(last) / len(last)

    @property
    def reached(self) -> int | str:
        """The first step after which the mean of 10 is above 90 %."""
        for step in range(10, len(self.success) + 1):
            if sum(self.success[step - 10 : step]) / 10 > 0.9:
                return step
        return "-"

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the table that the run fills."""
        steps, seconds = str(len(self.success)), f"{self.seconds:.0f}"
        return f"{self.first:.0%}", str(self.reached), f"{self.last:.0%}", steps, seconds


def learn(options: argparse.Namespace, task: str, seed: int, stale: bool) -> Learning:
    """A model trained on a task."""
    problem, at = TASKS[task], options.folder.resolve() / f"{task}-{seed}"
    at.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(seed)
    pairs = [problem.draw(drawn) for _ in range(PROMPTS)]
    examples = [(prompt, problem.example(drawn, answer)) for prompt, answer in pairs]
    for name, key, rows in (("examples", "completion", examples), ("prompts", "answer", pairs)):
        lines = (json.dumps({"prompt": prompt, key: answer}) + "\n" for prompt, answer in rows)
        if not (at / f"{name}.jsonl").is_file():
            (at / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    model = MODEL.format(seed=seed)
    supervised = SUPERVISED.format(at=at, steps=options.supervised or problem.supervised)
    before = _run(at / "base.json", f"pretrain_gpt.py {model} {supervised}")
    run = at / f"{options.algorithm}{'-stale' * stale}"
    flags = REINFORCED.format(
        at=at,
        algorithm=options.algorithm,
        reward=problem.reward,
        steps=options.steps or problem.steps,
        length=problem.length,
    )
    flags += f" --save {run} --metrics-file {run}.jsonl" + " --rl-staleness 1" * stale
    after = _run(Path(f"{run}.json"), f"pretrain_gpt.py {model} {flags} {options.more}")
    rows = [json.loads(line) for line in Path(f"{run}.jsonl").read_text("utf-8").splitlines()]
    success = [row["reward"] for row in rows if "reward" in row and row.get("kind") == "train"]
    return Learning(success, before + after)


def _run(done: Path, command: str) -> float:
    """CPU seconds of a command, whose result is kept."""
    if done.is_file():
        return float(json.loads(done.read_text("utf-8")))
    print(f"$ {command}", flush=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with done.with_suffix(".log").open("w") as log:
        subprocess.run(
            [sys.executable, *shlex.split(command)],
            cwd=ROOT,
            check=True,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = sum(getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime"))
    done.write_text(json.dumps(seconds), "utf-8")
    return seconds


def draw(curves: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Draw the success by step of every task, a line for each seed; dashed is the second kind."""
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, len(curves), figsize=(2.6 * len(curves), 2.6), sharey=True, squeeze=False
    )
    for axis, (task, kinds) in zip(grid[0], curves.items(), strict=True):
        for (name, lines), style in zip(kinds.items(), ("-", "--"), strict=False):
            for seed, success in enumerate(lines):
                means = [
                    sum(success[max(0, n - 9) : n + 1]) / min(10, n + 1)
                    for n in range(len(success))
                ]
                label = name if seed == 0 else None
                axis.plot(means, style, color=f"C{seed}", linewidth=1, label=label)
        axis.axhline(0.9, color="grey", linewidth=0.5)
        axis.set(title=task, xlabel="step", ylim=(0, 1))
    if len(kinds) > 1:
        axis.legend(loc="lower right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
