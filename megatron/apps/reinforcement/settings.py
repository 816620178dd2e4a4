"""Resolution of the reinforcement learning flags, with the defaults of each algorithm's paper, and
checks of their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron.apps.reinforcement.flags import PAIRED, ReinforcementConfig
from megatron.apps.reinforcement.rewards.confinement import LIMITS
from megatron.config.flags import ConfigResolver
from megatron.features.averages.feature import check_kept

_GROUPED = MappingProxyType(
    {
        "num_generations": 8,
        "num_iterations": 1,
        "dynamic_sampling": 0,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "beta": 0.0,
        "kl_in": "loss",
        "overlong_buffer_len": 0,
    }
)
_IN_REWARDS = {"loss_type": "dapo", "scale_rewards": "batch", "kl_in": "reward"}
PAPERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("DeepSeekMath, arXiv:2402.03300", {"beta": 0.04}),
    "dr_grpo": ("arXiv:2503.20783", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (
        "arXiv:2503.14476",
        {"loss_type": "dapo", "epsilon_high": 0.28, "dynamic_sampling": 3},
    ),
    "gspo": (
        "arXiv:2507.18071",
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "rloo": (
        "arXiv:2402.14740",
        {
            "num_generations": 4, "loss_type": "rloo", "scale_rewards": "none", "beta": 0.05,
            "kl_in": "reward",
        },
    ),
    "reinforce++": ("arXiv:2501.03262", {"num_generations": 1, "beta": 0.01, **_IN_REWARDS}),
    "ppo": (
        "arXiv:1707.06347",
        {"num_generations": 1, "num_iterations": 4, "beta": 0.05, **_IN_REWARDS},
    ),
    "online-dpo": (
        "arXiv:2402.04792",
        {"num_generations": 2, "loss_type": "sigmoid", "scale_rewards": "none", "beta": 0.1},
    ),
    "distill": ("arXiv:2306.13649", {"num_generations": 1, "scale_rewards": "none"}),
}  # fmt: skip
"""Source of each algorithm, and its values where they differ from ``_GROUPED``."""

_OF_SOME: Mapping[str, tuple[str, ...]] = {
    "gamma": ("ppo", "reinforce++"),
    **dict.fromkeys(("lam", "vf_coef", "cliprange_value"), ("ppo",)),
    "jsd_beta": ("distill",),
}
"""Flags that only these algorithms use."""
_OF_POLICY = (
    "epsilon", "epsilon_high", "delta", "importance_sampling_level", "kl_in", "kl_estimator",
    "use_bias_correction_kl", "entropy_coef", "off_policy_mask_threshold",
    "importance_sampling_correction", "scale_rewards",
)  # fmt: skip
"""Flags of the policy losses, which online-dpo and distill do not use."""
_OF_REWARDS = (
    "reward_funcs", "reward_weights", "reward_model", "reward_clip_range", "environment",
    "overlong_buffer_len", "missing_eos_penalty", "dynamic_sampling", "beta", "loss_type",
    "rl_curriculum", "sync_ref_model",
)  # fmt: skip
"""Flags without effect in distillation, where a teacher replaces rewards and reference model."""


def resolved(options: ReinforcementConfig, resolver: ConfigResolver) -> ReinforcementConfig:
    """Return the options with the algorithm's defaults for values that are not set."""
    if options.rl is None:
        return options
    paper, own = PAPERS[options.rl]
    defaults = {**_GROUPED, **own}
    if options.rl == "dapo":
        defaults["overlong_buffer_len"] = options.max_completion_length // 5
    values: dict[str, Any] = {}

    def fill(name: str, value: Any, how: str) -> Any:
        values[name] = resolver.fill(name, getattr(options, name), value, how)
        return values[name]

    for name, value in defaults.items():
        if name != "epsilon_high":
            fill(name, value, paper)
    if options.epsilon is not None and "epsilon_high" in defaults:
        fill("epsilon_high", options.epsilon, "--epsilon")
    else:
        fill("epsilon_high", defaults.get("epsilon_high", values["epsilon"]), paper)
    fill("kl_estimator", "k3" if values["kl_in"] == "loss" else "k1", "--kl-in")
    correction = "token_truncate" if options.rl_staleness else "none"
    fill("importance_sampling_correction", correction, "--rl-staleness")
    return dataclasses.replace(options, **values)


def check(options: ReinforcementConfig, config: Any, resolver: ConfigResolver) -> None:
    """Check the options against each other, the model and the batches. ``config`` is the
    :class:`~megatron.config.run.RunConfig`. Raises ConfigError if values contradict each other."""
    if options.rl is None:
        return
    _check_run(options, config, resolver)
    _check_unused(options, resolver)
    _check_loss(options, resolver)
    _check_rewards(options, resolver)
    _check_batches(options, config, resolver)
    if options.needs_reference and resolver.values.get("reference_checkpoint") is None:
        shown = resolver.show("beta")
        check_kept(shown, "the reference model", config, resolver)


def _check_run(options: ReinforcementConfig, config: Any, resolver: ConfigResolver) -> None:
    """Refuse other objectives in the same run, models that do not generate text, and settings that
    are incompatible with generation."""
    model, shown = config.model, f"--rl {options.rl}"
    resolver.check(
        model.family == "gpt" and model.head == "lm",
        f"{shown} trains a GPT, which writes texts, and this run has the family {model.family} "
        f"with {model.head_shown}",
    )
    for section in config.sections:
        others = () if section is options else (section.replaces_losses,)
        for flag in filter(None, others):
            resolver.check(False, f"{shown} contradicts {flag}: a run has one of these losses")
    for name, flag in (("sft", "--sft"), ("preference", "--preference")):
        resolver.check(
            not resolver.values.get(name),
            f"{shown} contradicts {flag}: the data paths are prompts, or have answers; leave one "
            "of them out",
        )
    resolver.check(
        not config.data.mock_data,
        f"{shown} needs prompts, which --mock-data does not make: name files with --data-path",
    )
    resolver.check(
        options.steps_of_texts == 1 or resolver.values.get("on_spike") != "rollback",
        f"{shown} trains for {options.steps_of_texts} steps on the same texts "
        "(--steps-per-generation, --num-iterations), of which --on-spike rollback would leave one "
        "out: give --on-spike stop",
    )
    room = model.seq_length - options.max_completion_length
    resolver.check(
        room >= (options.max_prompt_length or 1),
        f"{resolver.show('seq_length')} leaves {max(room, 0)} tokens for a prompt, after "
        f"{resolver.show('max_completion_length')}"
        + (
            "; give a larger --seq-length or a smaller --max-completion-length"
            if options.max_prompt_length is None
            else f" and less than {resolver.show('max_prompt_length')}"
        ),
    )


def _check_unused(options: ReinforcementConfig, resolver: ConfigResolver) -> None:
    """Refuse flags that the chosen algorithm does not use."""
    for name, algorithms in _OF_SOME.items():
        if options.rl not in algorithms:
            resolver.check_unused(name, f"--rl {' or '.join(algorithms)}")
    policy = "grpo, dr_grpo, dapo, gspo, rloo, reinforce++, ppo"
    if options.rl in ("online-dpo", "distill"):
        for name in _OF_POLICY:
            _unused(name, f"--rl {policy}", resolver)
    if options.rl == "distill":
        for name in _OF_REWARDS:
            _unused(name, f"--rl {policy}, online-dpo", resolver)
        resolver.check(
            resolver.values.get("load_teacher") is not None,
            "--rl distill needs --load-teacher, the checkpoint of the teacher",
        )


def _unused(name: str, needs: str, resolver: ConfigResolver) -> None:
    """Refuse a value set by the user; the algorithm's own defaults are exempt."""
    if not resolver.origins[name].startswith("derived"):
        resolver.check_unused(name, needs)


def _refuse(
    options: ReinforcementConfig, resolver: ConfigResolver, condition: bool, name: str, why: str
) -> None:
    resolver.check(not condition, f"--rl {options.rl} with {resolver.show(name)}: {why}")


def _check_loss(options: ReinforcementConfig, resolver: ConfigResolver) -> None:
    """Check the values of the loss, the reference model and the advantages."""
    refuse = partial(_refuse, options, resolver)
    paired = options.loss_type in PAIRED
    pairs = options.rl == "online-dpo"
    refuse(paired != pairs, "loss_type", f"give {' or '.join(PAIRED)} for online-dpo, and only it")
    refuse(pairs and options.beta == 0, "beta", "it is the scale of the rewards: give more than 0")
    refuse(
        options.loss_type == "rloo" and options.importance_sampling_level != "token",
        "importance_sampling_level",
        "the ratio of --loss-type rloo is the product over the tokens of a text; leave it out",
    )
    refuse(
        options.loss_type == "rloo" and options.by_token,
        "loss_type",
        "its texts have one advantage each, and here every token has one; give dapo or grpo",
    )
    refuse(
        options.by_token and options.importance_sampling_level == "sequence",
        "importance_sampling_level",
        "tokens have advantages; give token or sequence_token",
    )
    refuse(
        options.rl in ("rloo", "reinforce++", "ppo") and options.scale_rewards == "group",
        "scale_rewards",
        "its advantages are not those of a group; give batch or none",
    )
    refuse(
        options.kl_in == "reward" and options.kl_estimator == "k2",
        "kl_estimator",
        "in the rewards k1 and k3 are defined",
    )
    grouped = options.rl in ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
    refuse(
        grouped and (options.num_generations or 0) < 2,
        "num_generations",
        "a text is compared with the others of its group; give 2 or more",
    )
    refuse(pairs and options.num_generations != 2, "num_generations", "pairs are 2 texts")
    refuse(
        bool(options.dynamic_sampling) and options.num_generations == 1,
        "dynamic_sampling",
        "it needs groups of several texts: give --num-generations, too",
    )
    _check_bounds(options, resolver)


def _check_bounds(options: ReinforcementConfig, resolver: ConfigResolver) -> None:
    """Check the bounds on ratios and weights, and the flags of the reference model."""
    refuse = partial(_refuse, options, resolver)
    if options.epsilon is not None and options.loss_type != "cispo":
        refuse(options.epsilon >= 1, "epsilon", "a ratio is above 0; give less than 1")
    if options.delta is not None and options.epsilon_high is not None:
        refuse(
            options.delta <= 1 + options.epsilon_high,
            "delta",
            f"give more than 1 + --epsilon-high, {1 + options.epsilon_high:g}",
        )
    if options.sync_ref_model:
        resolver.check(
            resolver.values.get("reference_checkpoint") is None,
            f"{resolver.show('reference_checkpoint')} contradicts --sync-ref-model, which moves "
            "the weights that training began with; leave one of them out",
        )
    if not options.beta:
        for name in ("kl_in", "kl_estimator", "sync_ref_model"):
            _unused(name, "--beta above 0", resolver)
        resolver.check_unused("reference_checkpoint", "--beta above 0")
    lowest = options.importance_sampling_clip_min
    refuse(
        lowest is not None and lowest > options.importance_sampling_clip_max,
        "importance_sampling_clip_min",
        f"it is above {resolver.show('importance_sampling_clip_max')}",
    )
    if options.importance_sampling_correction == "none":
        for name in ("importance_sampling_clip_max", "importance_sampling_clip_min"):
            resolver.check_unused(name, "--importance-sampling-correction")


def _check_rewards(options: ReinforcementConfig, resolver: ConfigResolver) -> None:
    if not options.needs_rewards:
        return
    rewarded = options.reward_funcs or options.reward_model or options.environment
    resolver.check(
        bool(rewarded),
        f"--rl {options.rl} needs rewards: give --reward-funcs, --reward-model or --environment",
    )
    count = len(options.reward_funcs) + (options.reward_model is not None)
    weights = options.reward_weights
    resolver.check(
        len(weights) in (0, count),
        f"{resolver.show('reward_weights')}: {len(weights)} weights for {count} rewards; give one "
        "of each of --reward-funcs and, last, of --reward-model",
    )
    for name in options.reward_allow:
        resolver.check(
            name in LIMITS,
            f"{resolver.show('reward_allow')}: {name} must be one of {', '.join(LIMITS)}",
        )
    if options.reward_clip_range is not None:
        low, high = options.reward_clip_range
        resolver.check(
            low < high,
            f"{resolver.show('reward_clip_range')}: the first number must be below the second",
        )
    longest = options.overlong_buffer_len or 0
    resolver.check(
        longest <= options.max_completion_length,
        f"{resolver.show('overlong_buffer_len')} is above "
        f"{resolver.show('max_completion_length')}, the longest text",
    )
    if not longest:
        resolver.check_unused("overlong_penalty_factor", "--overlong-buffer-len above 0")


def _check_batches(options: ReinforcementConfig, config: Any, resolver: ConfigResolver) -> None:
    """Check that batches consist of whole groups, and that micro batches do not split pairs."""
    training, size = config.training, options.num_generations or 1
    sizes = {"global_batch_size": training.global_batch_size}
    if uneven := [n for n in training.batch_sizes[:-1] if n % size]:
        sizes["rampup_batch_size"] = uneven[0]
    if options.rl == "online-dpo":
        sizes["micro_batch_size"] = training.micro_batch_size
    for name, number in sizes.items():
        resolver.check(
            number % size == 0,
            f"{resolver.show(name)} is no multiple of {resolver.show('num_generations')}: a batch "
            "is made of whole groups of texts",
        )
