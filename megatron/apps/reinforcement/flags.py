"""Flags of reinforcement learning, by the names that trl gives them."""

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
"""Values of ``--loss-type``: of pairs of texts, and of the policy's tokens."""
_ABOVE_ONE = Bounds(lambda value: value > 1, "must be above 1")
_PROBABILITY = Bounds(lambda value: 0 < value <= 1, "must be in (0, 1]")
_SYNC = needs_value("sync_ref_model", True)
_MODEL = needs_value("reward_model")
_SUCCESS = needs_value("rl_curriculum", "success")


@dataclass(frozen=True)
class ReinforcementConfig(KindConfig):
    """Reinforcement learning: texts that the model writes in training, their rewards, the loss.

    A value of None stands for the default of the algorithm, until the run is resolved.
    """

    rl: str | None = option(
        None,
        choices=ALGORITHMS,
        spellings={
            "dr-grpo": "dr_grpo", "reinforce_pp": "reinforce++", "online_dpo": "online-dpo",
            "gkd": "distill",
        },
    )  # fmt: skip
    """Train on texts that the model itself writes after the prompts of the data paths, by this
    algorithm. It sets the defaults of its paper, each of which another flag can change."""

    num_generations: int | None = option(
        None,
        derived="8; rloo 4; online-dpo 2; reinforce++, ppo and distill 1",
        bounds=POSITIVE,
    )
    """Texts after each prompt, which are a group. A global batch is made of whole groups."""
    max_completion_length: int = option(512, bounds=POSITIVE)
    """Most tokens of a text, and, with an environment, of all that follows the prompt."""
    max_prompt_length: int | None = option(
        None, derived="--seq-length less --max-completion-length", bounds=POSITIVE
    )
    """Most tokens of a prompt. --on-long-example says what happens to longer ones."""
    temperature: float = option(1.0, bounds=POSITIVE)
    """Divisor of the logits where the model writes texts, and in the probabilities of the loss."""
    top_p: float = option(1.0, bounds=_PROBABILITY)
    """Draw among the fewest tokens whose probabilities sum to at least this. The loss takes the
    probabilities before this choice, and so with --top-k and --min-p."""
    top_k: int = option(0, bounds=NOT_NEGATIVE)
    """Draw among this number of most probable tokens; 0 for all."""
    min_p: float | None = option(None, bounds=SHARE)
    """Draw among the tokens that are at least this share as probable as the most probable one."""
    rollout_batch_size: int = option(64, bounds=POSITIVE, role="course")
    """Most texts that a replica writes at a time; the others wait. It changes no text."""
    num_iterations: int | None = option(
        None, derived="1; ppo 4", bounds=POSITIVE
    )  # fmt: skip
    """Passes of training over the same texts (mu in the paper of GRPO)."""
    steps_per_generation: int = option(1, bounds=POSITIVE)
    """Optimizer steps whose texts are written at once, before the first of them; in trl these are
    micro batches."""
    rl_staleness: int = option(0, choices=(0, 1))
    """1: the texts of a step are written under the weights of the step before, so that generation
    could overlap with training. Their losses get an importance weight."""
    rl_exact: str = option("auto", choices=("auto", "require", "off"))
    """Compute the probabilities of training in the order of those of generation, so that both have
    the same bits: auto does where the layout can, and logs the difference of every step;
    require refuses other layouts and ends the run if a step differs; off leaves both as they
    are."""
    dynamic_sampling: int | None = option(None, derived="0; dapo 3", bounds=NOT_NEGATIVE)
    """Replace groups whose rewards are all equal, of which nothing is learned, by groups of other
    prompts, at most this number of times (DAPO, Yu et al. 2025, section 3.2). What is still equal
    then does not count in the loss."""

    loss_type: str | None = option(
        None,
        choices=(*POLICY, *PAIRED),
        derived="that of the algorithm; gspo grpo; reinforce++ and ppo dapo; sigmoid "
        "for online-dpo",
    )
    """Units that count equally in a step's loss: every text (grpo), every token of a micro batch
    (bnpo), a token as one of --max-completion-length (dr_grpo), every token of the step (dapo, and
    cispo, which clips weights instead of ratios), or texts whose ratio is the product over tokens
    (rloo). sigmoid and ipo compare two texts."""
    importance_sampling_level: str | None = option(
        None,
        choices=("token", "sequence", "sequence_token"),
        derived="token; gspo sequence",
    )
    """Ratio of probabilities that is clipped: of each token, the geometric mean over a text (GSPO,
    Zheng et al. 2025, equation 7), or that mean with a gradient per token (equation 13)."""
    scale_rewards: str | None = option(
        None,
        choices=("group", "batch", "none"),
        derived="group; reinforce++ and ppo batch; dr_grpo and rloo none",
    )
    """Divide advantages by the standard deviation of the rewards of a group or of all texts of a
    step. For rloo, reinforce++ and ppo, batch makes the advantages' mean 0 and deviation 1."""
    epsilon: float | None = option(
        None, derived="0.2; gspo 0.0003", bounds=POSITIVE
    )  # fmt: skip
    """Clip the ratio of probabilities of new and old weights from below at 1 - this."""
    epsilon_high: float | None = option(
        None, derived="--epsilon; dapo 0.28; gspo 0.0004", bounds=POSITIVE
    )
    """Clip the ratio from above at 1 + this; for --loss-type cispo, the weight at this."""
    delta: float | None = option(None, bounds=_ABOVE_ONE)
    """Clip the ratio of tokens of bad texts from above at this, too (INTELLECT-2, 2025)."""
    beta: float | None = option(
        None,
        derived="grpo 0.04; rloo and ppo 0.05; reinforce++ 0.01; online-dpo 0.1; else 0",
        bounds=NOT_NEGATIVE,
        aliases=("--kl-coef",),
    )
    """Weight of the divergence from the reference model; 0 needs none. For online-dpo the scale of
    the rewards."""
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
    """Estimate of the divergence by the log-ratio d of a drawn token: d, its square over two, or
    exp(-d) - 1 + d (Schulman 2020)."""
    use_bias_correction_kl: bool = option(
        True, flag="--use-bias-correction-kl", off="--no-use-bias-correction-kl"
    )
    """Multiply the divergence in the loss by the ratio of probabilities, which makes its gradient
    that of the divergence (DeepSeek-V3.2, 2025)."""
    sync_ref_model: bool = option(False)
    """Move the reference model towards the model in training (TR-DPO, Gorbatovski et al. 2024)."""
    ref_model_mixup_alpha: float = option(0.6, bounds=_PROBABILITY, needs=_SYNC)
    """Share of the model in training in the new reference model."""
    ref_model_sync_steps: int = option(512, bounds=POSITIVE, needs=_SYNC)
    """Steps from one such move to the next."""
    entropy_coef: float = option(0.0, bounds=NOT_NEGATIVE)
    """Subtract this times the mean entropy of the tokens from the loss."""
    mask_truncated_completions: bool = option(False)
    """Leave texts that were cut off out of the loss."""
    overlong_buffer_len: int | None = option(
        None,
        derived="0; dapo a fifth of --max-completion-length",
        bounds=NOT_NEGATIVE,
    )
    """Lower the reward of texts that come within this number of tokens of the longest, linearly
    (DAPO, equation 13)."""
    overlong_penalty_factor: float = option(1.0, bounds=POSITIVE)
    """By how much the reward of a text of the greatest length is lowered so."""
    missing_eos_penalty: float = option(0.0, bounds=NOT_NEGATIVE)
    """Lower the reward of texts that were cut off by this."""
    off_policy_mask_threshold: float | None = option(None, bounds=POSITIVE)
    """Leave bad texts out of the loss whose mean log-probability has fallen by more than this since
    they were written (DeepSeek-V3.2, 2025, equation 9)."""
    importance_sampling_correction: str | None = option(
        None,
        choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        aliases=("--vllm-importance-sampling-mode",),
        derived="none; token_truncate with --rl-staleness",
    )
    """Weigh losses by the ratio of probabilities before training on a text and when it was written,
    of tokens or whole texts: limited to its bounds, or 0 outside of them."""
    importance_sampling_clip_max: float = option(
        3.0, bounds=POSITIVE, aliases=("--vllm-importance-sampling-clip-max",)
    )
    """Largest such ratio."""
    importance_sampling_clip_min: float | None = option(
        None, bounds=SHARE, aliases=("--vllm-importance-sampling-clip-min",)
    )
    """Smallest such ratio."""
    gamma: float = option(1.0, bounds=_PROBABILITY)
    """ppo, reinforce++: discount of later rewards."""
    lam: float = option(0.95, bounds=SHARE)
    """ppo: lambda of the generalized advantage estimate (Schulman et al. 2016)."""
    vf_coef: float = option(0.1, bounds=POSITIVE)
    """ppo: weight of the loss of the value head."""
    cliprange_value: float = option(0.2, bounds=POSITIVE)
    """ppo: most that a value may change in the steps on one text before it is clipped."""
    jsd_beta: float = option(1.0, bounds=SHARE)
    """distill, with --load-teacher: the divergence from teacher to student, from KL(teacher ||
    student) at 0 through the generalized Jensen-Shannon divergence to the reverse KL(student ||
    teacher) at 1 (Agarwal et al. 2024; beta of trl's GKD)."""

    reward_funcs: tuple[str, ...] = option(())
    """Rewards of texts: verifiers of this trainer by name, FILE.py:FUNCTION for functions of
    Python with trl's arguments, and command:WORDS for programs."""
    reward_weights: tuple[float, ...] = option(())
    """Weight of each of --reward-funcs and, last, --reward-model; 1 without this flag."""
    reward_model: str | None = option(None, aliases=("--reward-model-path",))
    """Checkpoint of a reward model, in any format, whose numbers are rewards."""
    reward_batch_size: int = option(8, bounds=POSITIVE, needs=_MODEL, role="course")
    """Texts that the reward model reads at a time."""
    reward_clip_range: tuple[float, float] | None = option(None)
    """Smallest and largest reward of a text, whose reward beyond that is cut off."""
    reward_timeout: float = option(10.0, bounds=POSITIVE)
    """Seconds after which the reward of a text counts as failed."""
    reward_memory_mib: int = option(1024, bounds=POSITIVE)
    """Memory of each process that computes rewards, or runs code of texts."""
    reward_allow: tuple[str, ...] = option(())
    """Limits of such processes that are not enforced: files (writing outside of their own folder),
    network, processes (their number), signals (to processes of others). A run does not start where
    the node cannot enforce one of the rest."""
    reward_workers: int = option(2, bounds=POSITIVE, role="course")
    """Processes of each replica that compute rewards."""
    reward_cache: bool = option(True, off="--no-reward-cache", role="course")
    """Keep rewards of texts that were scored before."""
    reward_failures: float = option(1.0, bounds=SHARE, role="course")
    """Share of the rewards of a step that may fail before the run ends."""
    answer_column: str | None = option(None, derived="answer, solution, ground_truth, target")
    """Column that the verifiers compare texts with."""
    tests_column: str | None = option(None, derived="tests, test_code, unit_tests")
    """Column with the unit tests that code of a text must pass."""
    schema_column: str | None = option(None, derived="schema, json_schema")
    """Column with the JSON schema that a text must agree with."""
    environment: str | None = option(None)
    """FILE.py:CLASS of an environment, whose reset and step methods answer the model."""
    max_turns: int = option(
        8, bounds=POSITIVE, aliases=("--max-tool-calling-iterations",),
        needs=needs_value("environment"),
    )  # fmt: skip
    """Most texts of the model in an episode of an environment."""

    rl_curriculum: str = option("none", choices=("none", "success"))
    """success: prompts come more often whose share of good texts is nearest to
    --curriculum-target."""
    curriculum_target: float = option(0.5, bounds=SHARE, needs=_SUCCESS)
    """Share of good texts that a prompt should have."""
    curriculum_success: float = option(0.5, needs=_SUCCESS)
    """Reward from which on a text is good."""
    curriculum_decay: float = option(0.5, bounds=FRACTION, needs=_SUCCESS)
    """Weight of earlier shares of a prompt in its mean share, per visit."""
    log_completions: bool = option(False, role="course")
    """Write texts with their rewards into completions.jsonl in --save, at every log line."""
    num_completions_to_print: int = option(0, bounds=NOT_NEGATIVE, role="course")
    """Texts that are printed with their rewards at every log line."""

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
        """True if the run compares the model with a frozen one."""
        return self.rl is not None and bool(self.beta) and self.rl != "distill"

    @property
    def has_values(self) -> bool:
        """True if the model has a value head."""
        return self.rl == "ppo"

    @property
    def by_token(self) -> bool:
        """True if each token of a text has its own advantage."""
        return self.rl in ("ppo", "reinforce++")

    @property
    def needs_rewards(self) -> bool:
        """True if texts need rewards."""
        return self.rl is not None and self.rl != "distill"

    @property
    def clip_from(self) -> tuple[float, float]:
        """Bounds of the ratio of probabilities, 1 left out: (epsilon, epsilon_high)."""
        assert self.epsilon is not None and self.epsilon_high is not None, "not resolved"
        return self.epsilon, self.epsilon_high

    @property
    def steps_of_texts(self) -> int:
        """Optimizer steps from one generation of texts to the next."""
        return self.steps_per_generation * (self.num_iterations or 1)
