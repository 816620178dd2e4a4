"""The loop of a run: made of its flags when model and data exist."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.apps.reinforcement.batches import Shapes
from megatron.apps.reinforcement.completions import CompletionLog
from megatron.apps.reinforcement.data.curriculum import SuccessCurriculum, repeated_prompts
from megatron.apps.reinforcement.exact.head import drawn_numbers
from megatron.apps.reinforcement.exact.model import inexact_device, inexact_layout, row_rule
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.held_out import HeldOutTexts
from megatron.apps.reinforcement.loop import ReinforcementLoop, SeenAgain
from megatron.apps.reinforcement.losses import SAMPLING_DIFFERENCE
from megatron.apps.reinforcement.rewards.scoring import Rewards, joined
from megatron.apps.reinforcement.rollout import Writing
from megatron.config import ConfigError
from megatron.data.samples import SampleDataset
from megatron.families import family_of, spec_of
from megatron.features.resilience.steps.spikes import Rollback
from megatron.formats import generation_settings
from megatron.training.context import Order, RunContext
from megatron.training.report import say
from megatron.training.resume import ResumeSource
from megatron.training.stopping import TrainingStopped
from megatron.training.trainer import Callback, Step, Trainer

STATE, CURRICULUM = "reinforcement", "prompt successes"
"""Names in ``state.json``."""


class PreparedRewards(Callback):
    """The rewards of a run, which are checked before its weights are loaded."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer


def prepare(context: RunContext) -> None:
    """Start the rewards, and let the samples of a generation come again in each further pass of
    training over it. Raises ConfigError if a source of rewards cannot be used."""
    options = context.config.section(ReinforcementConfig)
    context.add(Order.TEACH, PreparedRewards(scorer_of(context) if options.needs_rewards else None))
    passes, data = options.num_iterations or 1, context.data
    if passes > 1 and data.datasets.train is not None:
        size = context.config.training.global_batch_size * options.steps_per_generation
        again = SeenAgain(data.datasets.train, size, passes)
        context.data = data._replace(datasets=data.datasets._replace(train=again))


def start_loop(context: RunContext, reference: Any = None) -> ReinforcementLoop:
    """Let the loop train a run's engine on texts that it writes. Raises ConfigError if the flags
    require probabilities equal to generation's and the run cannot have them."""
    config, engine, run = context.config, context.engine, context.run
    options = config.section(ReinforcementConfig)
    shapes = _shapes(context, options)
    origin, train = context.origin, context.data.datasets.train
    assert train is not None
    settings = generation_settings.for_tokenizer(
        dict(origin.generation), origin.tokenizer, config.tokenizer, run.tokenizer
    )
    ends = generation_settings.end_tokens(run.tokenizer, settings)
    scorer = context.added(PreparedRewards).scorer
    prompts = getattr(train, "dataset", train) if isinstance(train, SeenAgain) else train
    repeated = repeated_prompts(prompts)
    texts = context.plan.batch_size.samples(context.plan.train_iters)
    answers = texts / (repeated.group * (options.num_iterations or 1))
    count = sum(len(part.usable) for part in repeated.files.values())
    context.report.say(f"rl: {answers:,.0f} prompts, {answers / count:.3g} epochs over {count:,}")
    begin_dialogue, curriculum = None, None
    if options.environment is not None and scorer is not None:
        from megatron.apps.reinforcement.rewards.environments import Environments

        environments = Environments.of(config, run.tokenizer, ends)
        scorer.environments, begin_dialogue = environments, environments.begin
    if options.rl_curriculum == "success":
        curriculum = SuccessCurriculum(options, repeated, config.training.seed)
    judge = None
    if options.reward_model is not None:
        from megatron.apps.reinforcement.rewards.reward_model import RewardModel

        judge = RewardModel.start(config, context.mesh)
    interval = config.logging.log_interval
    completions = CompletionLog(options, scorer, config.checkpoint.save, interval)
    loop = ReinforcementLoop(
        engine,
        run.tokenizer,
        Writing(options, config.training.seed, ends),
        shapes,
        prompts,
        scorer,
        partial(joined, options),
        drawn_numbers,
        reference,
        (completions, *([curriculum] if curriculum else [])),
        begin_dialogue,
        curriculum,
        judge,
    )

    def restore(origin: ResumeSource | None) -> None:
        if origin is not None and origin.continues:
            state = origin.found.open(verify=False).state
            loop.kept.load(state.get(STATE, {"replaced": 0, "generations": ()}))
            if curriculum is not None and CURRICULUM in state:
                curriculum.load(state[CURRICULUM])

    def go_back(train: SampleDataset[Any]) -> None:
        loop.prompts = train
        restore(context.added(Rollback).origin)

    loop.restore = go_back
    restore(context.source)
    context.notes[STATE] = loop.kept
    context.checkpoints.counted[STATE] = lambda: dict(loop.kept)
    if curriculum is not None:
        context.notes[CURRICULUM] = {}
        context.checkpoints.counted[CURRICULUM] = curriculum.state
    engine.look_ahead = loop.look_ahead
    context.add(Order.TEACH, loop)
    context.add(Order.TEACH, Records(context, loop))
    context.add(Order.TEACH, completions)
    _evaluate_rewards(context, loop)
    context.add(Order.TEACH, ExactnessCheck(loop, shapes.padded is not None))
    return loop


def _evaluate_rewards(context: RunContext, loop: ReinforcementLoop) -> None:
    """Let evaluations write texts after held-out prompts, instead of computing losses."""
    sets, options = context.data.datasets, loop.options
    if not options.needs_rewards:
        return
    valid, test = dict(sets.valid), dict(sets.test)
    context.data = context.data._replace(datasets=sets._replace(valid={}, test={}))
    count = context.plan.eval_micro_batches * context.config.training.micro_batch_size
    held_out = HeldOutTexts(
        loop.written,
        valid,
        test,
        count * context.mesh.samples.size,
        options.curriculum_success,
        context.mesh,
    )
    if count and (valid or test):
        context.add(Order.EVALUATE, held_out)


def scorer_of(context: RunContext) -> Any:
    """The rewards of a run."""
    return Rewards.of(context.config, context.run)


def _shapes(context: RunContext, options: ReinforcementConfig) -> Shapes:
    """Return the shapes of micro batches. Every rank must call it."""
    config, engine = context.config, context.engine
    family = family_of(config.model.family)
    generation = family.generation(config, context.run.tokenizer)
    dtype = next(engine.model.parameters()).dtype
    reason: str | None = "--rl-exact off"
    padded = None
    if options.rl == "distill":
        reason = "--rl distill compares whole distributions"
    elif options.rl_exact != "off":
        reason = inexact_layout(config, spec_of(config.model, config.parallel), dtype)
        if reason is None:
            rule = row_rule(engine)
            reason, padded = inexact_device(engine, rule), rule.padded
    if reason is not None:
        padded = None
        if options.rl_exact == "require":
            raise ConfigError(
                f"--rl-exact require: probabilities of training and generation differ in their "
                f"last bits, since {reason}; give auto, or another layout"
            )
        if options.rl != "distill":  # whose loss has no such numbers
            say(f"rl: training and generation differ in rounding ({reason}); the log says how far")
    data = family.data(config, context.run.tokenizer)
    return Shapes(
        data.length_multiple,
        generation.max_positions,
        padded,
        engine.mesh.pipeline.size > 1,
    )


class Records(Callback):
    """Metrics of texts for the log: of the texts that a step trains on, which with
    ``--rl-staleness`` were generated in the previous step."""

    def __init__(self, context: RunContext, loop: ReinforcementLoop) -> None:
        self._context, self._loop = context, loop

    def after_step(self, trainer: Trainer, step: Step) -> None:
        for name, value in self._loop.numbers.items():
            self._context.report.record(name, value, "mean")


class ExactnessCheck(Callback):
    """Compares the probabilities from which tokens were sampled with the probabilities in training,
    at every step whose texts were sampled from its own weights."""

    def __init__(self, loop: ReinforcementLoop, promised: bool) -> None:
        self._loop, self._promised = loop, promised

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if not (self._promised and self._loop.fresh):
            return
        difference = float(step.result.losses[SAMPLING_DIFFERENCE])
        if difference == 0.0:
            return
        text = (
            f"step {step.iteration}, samples {step.first_sample:,} to "
            f"{step.first_sample + step.samples - 1:,}: log-probabilities of training differ from "
            f"those of generation by {difference:.3g} in the mean, and should have the same bits"
        )
        if self._loop.options.rl_exact == "require":
            raise TrainingStopped(f"{text} (--rl-exact require)")
        say(f"rl: {text}")
