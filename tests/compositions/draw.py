"""Compositions drawn from what the configuration accepts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.ranks import environment
from megatron.config import ConfigError
from megatron.config.layouts import Layout
from megatron.run.run import parse_run

BASE = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr-decay-style constant "
    "--tokenizer-type NullTokenizer --vocab-size 99 --mock-data --num-workers 0 --eval-iters 0 "
    "--peak-tflops 1 --log-interval 1000 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3"
)
STEPS = 4

LAYOUTS = (
    "dp1 dp2 dp4 tp2 tp4 tp2-sp tp4-sp tp2-dp2 tp2-sp-dp2 pp2 pp4 pp2-dp2 tp2-pp2 tp2-sp-pp2 "
    "pp2-interleaved pp2-interleaved-dp2 tp2-sp-pp2-interleaved pp2-dualpipev pp2-dualpipev-dp2 "
    "tp2-sp-pp2-dualpipev pp4-zbh1 tp2-sp-pp2-zbh1 pp2-dualpipev_zb cp2 cp2-a2a cp2-allgather cp4 "
    "cp4-a2a+p2p cp2-dp2 cp2-tp2-sp cp2-a2a-tp2-sp cp2-pp2 ep2-dp2 ep2-dp4 ep4-dp4 ep2-dp2-tp2 "
    "ep2-dp2-pp2 ep2-etp1-tp2"
).split()
PATTERN = "M*-G*E"
"""Letters of hybrid models: Mamba-2, attention, an MLP, Gated DeltaNet, attention, experts."""


def read_options(text: str) -> dict[str, list[tuple[int, str]]]:
    """Return the weights and flags of each option of ``options.txt``."""
    options: dict[str, list[tuple[int, str]]] = {}
    choices: list[tuple[int, str]] = []
    for line in text.splitlines():
        if line.startswith("  "):
            weight, _, flags = line.strip().partition(" ")
            choices.append((int(weight), flags))
        elif line and not line.startswith("#"):
            choices = options[line] = []
    return options


OPTIONS = read_options((Path(__file__).parent / "options.txt").read_text("utf-8"))

OF_RUN = ("recompute", "memory", "overlap", "saving", "report", "partition")
"""Options that must not change results: the run of one process has none of them."""


@dataclass(frozen=True)
class Composition:
    """A run to compare with one process.

    Attributes:
        seed: what it was drawn from.
        layout: its name, with ZeRO's stage.
        options: the flags chosen of each option that adds some.
        micro_batch: samples of a micro batch; ``times`` the fewest micro batches of the schedule.
        layers: blocks of the model.
        resume: steps before the run is stopped and continued.
    """

    seed: int
    layout: str
    options: tuple[tuple[str, str], ...]
    micro_batch: int
    times: int
    layers: int
    resume: int

    @property
    def parsed(self) -> Layout:
        return parse_layout(self.layout)

    @property
    def precision(self) -> str:
        return dict(self.options).get("precision", "")

    @property
    def comparable(self) -> bool:
        """False if results depend on the layout, as documented: random numbers that one process
        does not draw, or not in chunks, and a balancing loss of the tokens counted so far."""
        others = {
            "all": (),
            "hidden": ("--attention-dropout", "--moe-input-jitter-eps"),
            "none": ("--attention-dropout", "--hidden-dropout", "--moe-input-jitter-eps"),
        }[self.parsed.dropout]
        if self.parsed.data > 1:
            others = (*others, "global_aux_loss")
        if "-fpdt" in str(self):
            others = (*others, "-dropout ")
        return not any(each in str(self) for each in others)

    def flags(self, base: str = "base", run: str = "run") -> list[str]:
        """All flags of the run; ``base`` is a checkpoint of :attr:`base`, ``run`` a folder."""
        flags = [run if word == "@run" else word for word in self._flags(base, ())]
        return [*flags, *flags_for(self.parsed)]

    def flags_alone(self, base: str = "base") -> list[str]:
        """Flags of the model, the data and the batch, the same for every layout."""
        return self._flags(base, OF_RUN)

    def _flags(self, base: str, left_out: Collection[str]) -> list[str]:
        smallest = self.micro_batch * self.parsed.fewest_micro_batches * self.parsed.data
        batch = smallest * self.times
        text = " ".join(flags for option, flags in self.options if option not in left_out)
        length = f"--train-samples {STEPS * batch}" if "--rampup" in text else ""
        text = f"{BASE} {length or f'--train-iters {STEPS}'} --num-layers @layers {text}"
        text += f" --micro-batch-size {self.micro_batch} --global-batch-size @batch"
        words = {
            "@layers": str(self.layers),
            "@pattern": "".join(itertools.islice(itertools.cycle(PATTERN), self.layers)),
            "@batch": str(batch),
            "@start": str(smallest),
            "@base": base,
        }
        for name, word in words.items():
            text = text.replace(name, word)
        return text.split()

    @property
    def base(self) -> Composition | None:
        """The model to which adapters are added, or that teaches; None without either."""
        return self.without("adapters", "teacher", "order") if "@base" in str(self) else None

    def without(self, *options: str) -> Composition:
        """Return the composition without the flags of some options."""
        kept = tuple(each for each in self.options if each[0] not in options)
        return replace(self, options=kept)

    def smaller(self) -> Iterator[Composition]:
        """Compositions with one thing less, to find what a failure needs."""
        yield from (self.without(option) for option, _ in self.options)
        if self.times > 1:
            yield replace(self, times=1)
        if self.micro_batch > 1:
            yield replace(self, micro_batch=1)
        tokens = self.layout.split("-")
        for at in range(len(tokens)):
            if len(tokens) > 1:
                yield replace(self, layout="-".join(tokens[:at] + tokens[at + 1 :]))

    def __str__(self) -> str:
        return ", ".join([f"seed {self.seed}", self.layout, *(text for _, text in self.options)])


def drawn(seed: int) -> Composition:
    """Draw a composition that the configuration accepts; the same for the same seed."""
    attempts = (_drawn(seed, attempt) for attempt in itertools.count())
    return next(each for each in attempts if refusal(each) is None)


def _drawn(seed: int, attempt: int) -> Composition:
    draw = random.Random(f"{seed}/{attempt}")
    name = draw.choice(LAYOUTS)
    parsed = parse_layout(name)
    stage = draw.choice((0, 1) if parsed.pipeline > 1 else (0, 1, 2, 3))
    choices = {
        option: draw.choices([text for _, text in values], [weight for weight, _ in values])[0]
        for option, values in OPTIONS.items()
    }
    if parsed.expert > 1 and not choices["experts"]:
        choices["experts"] = draw.choice(OPTIONS["experts"][1:])[1]
    stages = parsed.pipeline * parsed.chunks
    return Composition(
        seed,
        f"{name}-zero{stage}" if stage else name,
        tuple((option, text) for option, text in choices.items() if text),
        draw.choice((1, 2)),
        draw.choice((1, 1, 2)) if stages > 1 else draw.choice((1, 2, 3)),
        max(2, stages) * draw.choice((1, 2)) if stages <= 2 else 2 * stages,
        draw.randrange(1, STEPS),
    )


def refusal(composition: Composition) -> str | None:
    """Return the reason for which the configuration refuses a composition, or its model on one
    process; None if both are accepted. Adapters and teachers need their base to be parsed."""
    without_base = composition.without("adapters", "teacher")
    try:
        with environment({"WORLD_SIZE": str(composition.parsed.processes)}):
            parse_run(None, without_base.flags())
        with environment({"WORLD_SIZE": "1"}):
            parse_run(None, without_base.flags_alone())
    except ConfigError as error:
        return str(error)
    return None
