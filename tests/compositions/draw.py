"""Compositions drawn from what the configuration accepts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.ranks import environment
from megatron.config import ConfigError
from megatron.config.layouts import Layout
from megatron.families import trained_spec
from megatron.model.layer_list import LayerStack
from megatron.parallel.tensor_parallel import TensorParallel
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


Options = tuple[tuple[str, str], ...]
"""Names of options, and the flags chosen of each."""


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
        target: the layout that its checkpoint continues in as well.
    """

    seed: int
    layout: str
    options: Options
    micro_batch: int
    times: int
    layers: int
    resume: int
    target: str = "dp1"

    @property
    def parsed(self) -> Layout:
        return parse_layout(self.layout)

    @property
    def elsewhere(self) -> Composition | None:
        """The same micro batches in the layout :attr:`target`; None if it cannot divide them, or
        not in the sizes that a growing batch has."""
        target = parse_layout(self.target)
        samples = self.times * self.parsed.fewest_micro_batches * self.parsed.data
        times, rest = divmod(samples, target.fewest_micro_batches * target.data)
        if times == 0 or rest or ("--rampup" in str(self) and times != self.times):
            return None
        return replace(self.without(*OF_RUN), layout=self.target, times=times)

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
        if self.target != "dp1":
            yield replace(self, target="dp1")

    def __str__(self) -> str:
        layouts = f"{self.layout} to {self.target}"
        return ", ".join([f"seed {self.seed}", layouts, *(text for _, text in self.options)])


def drawn(seed: int) -> Composition:
    """Draw a composition that the configuration accepts; the same for the same seed."""
    draw = random.Random(seed)
    chosen = {
        option: draw.choices([text for _, text in values], [weight for weight, _ in values])[0]
        for option, values in OPTIONS.items()
    }
    # Of the options that contradict each other, the first in a random order is kept.
    order = [option for option in draw.sample(list(chosen), len(chosen)) if chosen[option]]
    family: Options = (("family", chosen["family"]),) if chosen["family"] else ()
    attempts = (_bare(seed, draw, family) for _ in itertools.count())
    composition = next(each for each in attempts if refusal(each) is None)
    for option in order:
        more = replace(composition, options=((option, chosen[option]), *composition.options))
        if option not in dict(composition.options) and refusal(more) is None:
            composition = more
    places = list(OPTIONS)
    options = sorted(composition.options, key=lambda each: places.index(each[0]))
    composition = replace(composition, options=tuple(options))
    return replace(composition, target=_target(composition))


def _bare(seed: int, draw: random.Random, options: Options) -> Composition:
    """Draw a layout, with experts if it divides them, and sizes."""
    name = _with_stage(draw, draw.choice(LAYOUTS))
    parsed = parse_layout(name)
    if parsed.expert > 1:
        options += (("experts", draw.choice(OPTIONS["experts"][1:])[1]),)
    stages = parsed.pipeline * parsed.chunks
    return Composition(
        seed,
        name,
        options,
        draw.choice((1, 2)),
        draw.choice((1, 1, 2)) if stages > 1 else draw.choice((1, 2, 3)),
        max(2, stages) * draw.choice((1, 2)) if stages <= 2 else 2 * stages,
        draw.randrange(1, STEPS),
    )


def _target(composition: Composition) -> str:
    draw = random.Random(f"{composition.seed}/target")
    for name in draw.sample(LAYOUTS, len(LAYOUTS)):
        target = _with_stage(draw, name)
        other = replace(composition, target=target).elsewhere
        if other is not None and refusal(other) is None:
            return target
    return composition.layout


def _with_stage(draw: random.Random, name: str) -> str:
    stage = draw.choice((0, 1) if parse_layout(name).pipeline > 1 else (0, 1, 2, 3))
    return f"{name}-zero{stage}" if stage else name


def refusal(composition: Composition) -> str | None:
    """Return the reason for which the configuration refuses a composition, or its model on one
    process; None if both are accepted. Adapters and teachers need their base to be parsed."""
    without_base = composition.without("adapters", "teacher")
    try:
        with environment({"WORLD_SIZE": str(composition.parsed.processes)}):
            parse_run(None, without_base.flags())
        with environment({"WORLD_SIZE": "1"}), torch.device("meta"):
            config = parse_run(None, without_base.flags_alone()).config
            LayerStack(trained_spec(config).layers(TensorParallel()), config.parallel)
    except ConfigError as error:
        return str(error)
    return None
