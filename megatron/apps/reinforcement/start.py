"""Start of reinforcement learning: build the loop from the flags once model and data exist."""

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
"""Keys of the checkpoint's ``state.json``."""


class PreparedRewards(Callback):
    """Rewards of a run, created and checked before its weights are loaded."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer


def prepare(context: RunContext) -> None:
    """Create the rewards, and repeat the samples of each generation for every additional training
    pass over it. Raises ConfigError if a reward source cannot be used."""
    options = context.config.section(ReinforcementConfig)
    context.add(Order.TEACH, PreparedRewards(scorer_of(context) if options.needs_rewards else None))
    passes, data = options.num_iterations or 1, context.data
    if passes > 1 and data.datasets.train is not None:
        size = context.config.training.global_batch_size * options.steps_per_generation
        again = SeenAgain(data.datasets.train, size, passes)
        context.data = data._replace(datasets=data.datasets._replace(train=again))


def start_loop(context: RunContext, reference: Any = None) -> ReinforcementLoop:
    """Create the loop that trains a run's engine on its own completions. Raises ConfigError if
    ``--rl-exact require`` is set and the run's probabilities in training cannot equal those in
    generation."""
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
    """Make evaluations report the rewards of completions of held-out prompts instead of losses."""
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
    """Create the rewards of a run."""
    return Rewards.of(context.config, context.run)


def _shapes(context: RunContext, options: ReinforcementConfig) -> Shapes:
    """Return the rules for the shapes of micro batches. Collective: every rank must call it. Raises
    ConfigError if ``--rl-exact require`` cannot be satisfied."""
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
        if options.rl != "distill":  # whose loss does not log this difference
            say(f"rl: training and generation differ in rounding ({reason}); the log says how far")
    data = family.data(config, context.run.tokenizer)
    return Shapes(
        data.length_multiple,
        generation.max_positions,
        padded,
        engine.mesh.pipeline.size > 1,
    )


class Records(Callback):
    """Callback that logs metrics of the completions that a step trains on. With ``--rl-staleness``
    they were generated in the previous step."""

    def __init__(self, context: RunContext, loop: ReinforcementLoop) -> None:
        self._context, self._loop = context, loop

    def after_step(self, trainer: Trainer, step: Step) -> None:
        for name, value in self._loop.numbers.items():
            self._context.report.record(name, value, "mean")


class ExactnessCheck(Callback):
    """Callback that compares sampling probabilities with training probabilities, at every step
    whose completions were sampled with the weights that the step starts from. Raises
    TrainingStopped with ``--rl-exact require`` if they differ, and prints a message otherwise."""

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
