"""Flags of reinforcement learning, under trl's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import KindConfig
from megatron.config.flags import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Bounds,
    needs_value,
    option,
)

ALGORITHMS = (
    "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++", "ppo", "online-dpo", "distill",
)  # fmt: skip
PAIRED, POLICY = ("sigmoid", "ipo"), ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "rloo")
"""Values of ``--loss-type`` for pairs of completions, and for single completions."""
_ABOVE_ONE = Bounds(lambda value: value > 1, "must be above 1")
_PROBABILITY = Bounds(lambda value: 0 < value <= 1, "must be in (0, 1]")
_SYNC = needs_value("sync_ref_model", True)
_MODEL = needs_value("reward_model")
_SUCCESS = needs_value("rl_curriculum", "success")


@dataclass(frozen=True)
class ReinforcementConfig(KindConfig):
    """Reinforcement learning: generation of completions, their rewards, and the loss.

    None stands for the algorithm's default until the configuration is resolved.
    """

    rl: str | None = option(
        None,
        choices=ALGORITHMS,
        spellings={
            "dr-grpo": "dr_grpo", "reinforce_pp": "reinforce++", "online_dpo": "online-dpo",
            "gkd": "distill",
        },
    )  # fmt: skip
    """Reinforcement learning algorithm. The model trains on completions that it generates for the
    prompts in the data paths. The algorithm sets the defaults of its paper; other flags override
    them."""

    num_generations: int | None = option(
        None,
        derived="8; rloo 4; online-dpo 2; reinforce++, ppo and distill 1",
        bounds=POSITIVE,
    )
    """Number of completions per prompt, which form a group. A global batch consists of whole
    groups."""
    max_completion_length: int = option(512, bounds=POSITIVE)
    """Maximum number of tokens of a completion or, with an environment, of everything after the
    prompt."""
    max_prompt_length: int | None = option(
        None, derived="--seq-length less --max-completion-length", bounds=POSITIVE
    )
    """Maximum number of tokens of a prompt. --on-long-example selects how longer ones are
    treated."""
    temperature: float = option(1.0, bounds=POSITIVE)
    """Sampling temperature, by which the logits are divided both in generation and in the loss."""
    top_p: float = option(1.0, bounds=_PROBABILITY)
    """Sample from the smallest set of tokens whose probabilities sum to at least this value. The
    loss uses the probabilities before this filter, --top-k and --min-p."""
    top_k: int = option(0, bounds=NOT_NEGATIVE)
    """Sample from this number of most probable tokens; 0 selects all tokens."""
    min_p: float | None = option(None, bounds=SHARE)
    """Sample from tokens whose probability is at least this fraction of the highest one."""
    rollout_batch_size: int = option(64, bounds=POSITIVE, role="course")
    """Maximum number of completions that a replica generates concurrently; the others wait. It does
    not change the completions."""
    num_iterations: int | None = option(
        None, derived="1; ppo 4", bounds=POSITIVE
    )  # fmt: skip
    """Number of training passes over the same completions (mu in the GRPO paper)."""
    steps_per_generation: int = option(1, bounds=POSITIVE)
    """Number of optimizer steps whose completions are generated together, before the first of these
    steps. In trl this flag counts micro batches."""
    rl_staleness: int = option(0, choices=(0, 1))
    """With 1, generate the completions of a step with the weights of the previous step, so that
    generation could overlap with training. Their losses are then importance-weighted."""
    rl_exact: str = option("auto", choices=("auto", "require", "off"))
    """Compute training probabilities in the same order as generation probabilities, so that they
    are bitwise equal. auto does so if the layout allows it, and logs the difference at every step.
    require refuses other layouts, and ends the run if a step differs. off does neither."""
    dynamic_sampling: int | None = option(None, derived="0; dapo 3", bounds=NOT_NEGATIVE)
    """Replace groups whose rewards are all equal, from which nothing is learned, by groups of other
    prompts, at most this number of times (DAPO, Yu et al. 2025, section 3.2). Groups whose rewards
    are still equal are excluded from the loss."""

    loss_type: str | None = option(
        None,
        choices=(*POLICY, *PAIRED),
        derived="that of the algorithm; gspo grpo; reinforce++ and ppo dapo; sigmoid "
        "for online-dpo",
    )
    """Aggregation of the loss, named after its paper. grpo weights all completions equally, bnpo
    all tokens of a micro batch, and dapo all tokens of the step. cispo does the same as dapo but
    clips weights instead of ratios. dr_grpo divides by --max-completion-length. rloo uses one ratio
    per completion, the product over its tokens. sigmoid and ipo compare two completions."""
    importance_sampling_level: str | None = option(
        None,
        choices=("token", "sequence", "sequence_token"),
        derived="token; gspo sequence",
    )
    """Probability ratio that is clipped: of each token, the geometric mean over a completion (GSPO,
    Zheng et al. 2025, equation 7), or that mean with a gradient per token (equation 13)."""
    scale_rewards: str | None = option(
        None,
        choices=("group", "batch", "none"),
        derived="group; reinforce++ and ppo batch; dr_grpo and rloo none",
    )
    """Rewards whose standard deviation divides the advantages: the rewards of a group, or of all
    completions of a step. For rloo, reinforce++ and ppo, batch normalises the advantages to mean 0
    and standard deviation 1."""
    epsilon: float | None = option(
        None, derived="0.2; gspo 0.0003", bounds=POSITIVE
    )  # fmt: skip
    """Lower clipping range: the ratio of new to old probabilities is clipped at 1 minus this
    value."""
    epsilon_high: float | None = option(
        None, derived="--epsilon; dapo 0.28; gspo 0.0004", bounds=POSITIVE
    )
    """Upper clipping range: the ratio is clipped at 1 plus this value. With --loss-type cispo, the
    weight is clipped at this value."""
    delta: float | None = option(None, bounds=_ABOVE_ONE)
    """Upper bound on the ratio for tokens with negative advantages (INTELLECT-2, 2025)."""
    beta: float | None = option(
        None,
        derived="grpo 0.04; rloo and ppo 0.05; reinforce++ 0.01; online-dpo 0.1; else 0",
        bounds=NOT_NEGATIVE,
        aliases=("--kl-coef",),
    )
    """Weight of the KL divergence from the reference model; 0 needs no reference model. For
    online-dpo, the scale of the rewards."""
    kl_in: str | None = option(
        None,
        choices=("loss", "reward"),
        derived="loss; rloo, reinforce++ and ppo reward",
    )
    """Add the divergence to the loss, or subtract it from the rewards."""
    kl_estimator: str | None = option(
        None,
        choices=("k1", "k2", "k3"),
        derived="k3 in the loss, k1 in rewards",
    )
    """Estimator of the divergence from the log-ratio d of a sampled token: k1 is d, k2 is d squared
    over two, and k3 is exp(-d) - 1 + d (Schulman 2020)."""
    use_bias_correction_kl: bool = option(
        True, flag="--use-bias-correction-kl", off="--no-use-bias-correction-kl"
    )
    """Multiply the divergence in the loss by the probability ratio, so that its gradient is the
    gradient of the divergence (DeepSeek-V3.2, 2025)."""
    sync_ref_model: bool = option(False)
    """Update the reference model towards the model in training at intervals (TR-DPO, 2024)."""
    ref_model_mixup_alpha: float = option(0.6, bounds=_PROBABILITY, needs=_SYNC)
    """Weight of the model in training in each update of the reference model."""
    ref_model_sync_steps: int = option(512, bounds=POSITIVE, needs=_SYNC)
    """Number of steps between updates of the reference model."""
    entropy_coef: float = option(0.0, bounds=NOT_NEGATIVE)
    """Weight of the mean token entropy, which is subtracted from the loss."""
    mask_truncated_completions: bool = option(False)
    """Exclude truncated completions from the loss."""
    overlong_buffer_len: int | None = option(
        None,
        derived="0; dapo a fifth of --max-completion-length",
        bounds=NOT_NEGATIVE,
    )
    """Length penalty: number of tokens before the maximum completion length over which the penalty
    rises linearly (DAPO, equation 13). 0 disables the penalty."""
    overlong_penalty_factor: float = option(1.0, bounds=POSITIVE)
    """Penalty subtracted from the reward of a completion of maximum length."""
    missing_eos_penalty: float = option(0.0, bounds=NOT_NEGATIVE)
    """Penalty subtracted from the reward of truncated completions."""
    off_policy_mask_threshold: float | None = option(None, bounds=POSITIVE)
    """Exclude from the loss completions with a negative advantage whose mean log-probability has
    fallen by more than this value since they were sampled (DeepSeek-V3.2, 2025, equation 9)."""
    importance_sampling_correction: str | None = option(
        None,
        choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        aliases=("--vllm-importance-sampling-mode",),
        derived="none; token_truncate with --rl-staleness",
    )
    """Weight losses by the ratio of the probabilities before training on a completion to those at
    sampling, per token or per completion. Ratios out of bounds are clipped (truncate) or set to 0
    (mask)."""
    importance_sampling_clip_max: float = option(
        3.0, bounds=POSITIVE, aliases=("--vllm-importance-sampling-clip-max",)
    )
    """Upper bound on the importance weight."""
    importance_sampling_clip_min: float | None = option(
        None, bounds=SHARE, aliases=("--vllm-importance-sampling-clip-min",)
    )
    """Lower bound on the importance weight."""
    gamma: float = option(1.0, bounds=_PROBABILITY)
    """ppo, reinforce++: discount factor for later rewards."""
    lam: float = option(0.95, bounds=SHARE)
    """ppo: lambda of the generalized advantage estimate (Schulman et al. 2016)."""
    vf_coef: float = option(0.1, bounds=POSITIVE)
    """ppo: weight of the value head's loss."""
    cliprange_value: float = option(0.2, bounds=POSITIVE)
    """ppo: maximum difference from the old value to which the new value is clipped in the value
    loss."""
    jsd_beta: float = option(1.0, bounds=SHARE)
    """distill, with --load-teacher: interpolation of the divergence, from KL(teacher || student) at
    0 through the generalized Jensen-Shannon divergence to the reverse KL(student || teacher) at 1
    (Agarwal et al. 2024; beta of trl's GKD)."""

    reward_funcs: tuple[str, ...] = option(())
    """Reward functions: the built-in verifiers by name, FILE.py:FUNCTION for Python functions with
    trl's arguments, and command:WORDS for programs."""
    reward_weights: tuple[float, ...] = option(())
    """Weight of each of --reward-funcs and, last, of --reward-model. Without this flag, all weights
    are 1."""
    reward_model: str | None = option(None, aliases=("--reward-model-path",))
    """Checkpoint of a reward model, in any format. Its scores are used as rewards."""
    reward_batch_size: int = option(8, bounds=POSITIVE, needs=_MODEL, role="course")
    """Number of completions per forward pass of the reward model."""
    reward_clip_range: tuple[float, float] | None = option(None)
    """Minimum and maximum reward of a completion. Rewards are clipped to this range."""
    reward_timeout: float = option(10.0, bounds=POSITIVE)
    """Timeout for the reward of one completion, in seconds. A reward that takes longer counts as
    failed."""
    reward_memory_mib: int = option(1024, bounds=POSITIVE)
    """Memory limit, in MiB, of each process that computes rewards or runs generated code."""
    reward_allow: tuple[str, ...] = option(())
    """Limits on such processes that are not enforced: files (writing outside of their own folder),
    network, processes (their number), signals (to other processes). A run does not start if the
    node cannot enforce one of the other limits."""
    reward_workers: int = option(2, bounds=POSITIVE, role="course")
    """Number of processes that compute rewards, per replica."""
    reward_cache: bool = option(True, off="--no-reward-cache", role="course")
    """Score every completion, instead of reusing the rewards of equal completions of a prompt."""
    reward_failures: float = option(1.0, bounds=SHARE, role="course")
    """Fraction of a step's rewards that may fail before the run ends."""
    answer_column: str | None = option(None, derived="answer, solution, ground_truth, target")
    """Column with the reference answer that the verifiers compare with a completion."""
    tests_column: str | None = option(None, derived="tests, test_code, unit_tests")
    """Column with the unit tests that the code in a completion must pass."""
    schema_column: str | None = option(None, derived="schema, json_schema")
    """Column with the JSON schema that a completion must satisfy."""
    environment: str | None = option(None)
    """FILE.py:CLASS of an environment. Its reset and step methods respond to the model."""
    max_turns: int = option(
        8, bounds=POSITIVE, aliases=("--max-tool-calling-iterations",),
        needs=needs_value("environment"),
    )  # fmt: skip
    """Maximum number of turns of the model in an episode of an environment."""

    rl_curriculum: str = option("none", choices=("none", "success"))
    """Order of the prompts. success repeats prompts more often the nearer their success rate, the
    fraction of good completions, is to --curriculum-target."""
    curriculum_target: float = option(0.5, bounds=SHARE, needs=_SUCCESS)
    """Success rate that the curriculum prefers."""
    curriculum_success: float = option(0.5, needs=_SUCCESS)
    """Minimum reward of a good completion."""
    curriculum_decay: float = option(0.5, bounds=FRACTION, needs=_SUCCESS)
    """Weight of earlier visits in the moving average of a prompt's success rate."""
    log_completions: bool = option(False, role="course")
    """Append completions with their rewards to completions.jsonl in --save, at every log line."""
    num_completions_to_print: int = option(0, bounds=NOT_NEGATIVE, role="course")
    """Number of completions to print with their rewards at every log line."""

    files: ClassVar[str | None] = "prompts"
    samples: ClassVar[str] = "prompts"
    shares: ClassVar[frozenset[str]] = frozenset(
        {
            *("prompt_format", "chat_template", "on_long_example", "split_by"),
            *("messages_column", "prompt_column", "context_column", "system_column"),
            *("ignore_columns", "reference_checkpoint"),
        }
    )
    idle: ClassVar[str] = "this run does no reinforcement learning (--rl)"

    @property
    def reads_all(self) -> bool:
        return self.rl is not None

    @property
    def acts(self) -> bool:
        return self.rl is not None

    @property
    def replaces_losses(self) -> str | None:
        return None if self.rl is None else f"--rl {self.rl}"

    @property
    def needs_reference(self) -> bool:
        """True if the run compares the model with a frozen reference model."""
        return self.rl is not None and bool(self.beta) and self.rl != "distill"

    @property
    def has_values(self) -> bool:
        """True if the model has a value head."""
        return self.rl == "ppo"

    @property
    def by_token(self) -> bool:
        """True if the tokens of a completion have different advantages."""
        return self.rl in ("ppo", "reinforce++")

    @property
    def needs_rewards(self) -> bool:
        """True if completions need rewards."""
        return self.rl is not None and self.rl != "distill"

    @property
    def clip_from(self) -> tuple[float, float]:
        """Distances from 1, below and above, at which the ratio is clipped: (epsilon,
        epsilon_high)."""
        assert self.epsilon is not None and self.epsilon_high is not None, "not resolved"
        return self.epsilon, self.epsilon_high

    @property
    def steps_of_texts(self) -> int:
        """Number of optimizer steps from one generation to the next."""
        return self.steps_per_generation * (self.num_iterations or 1)
