"""The defaults of each algorithm's paper, and values that contradict each other."""

import pytest

from megatron.apps.reinforcement.feature import FEATURE
from megatron.apps.reinforcement.flags import ALGORITHMS, ReinforcementConfig
from megatron.apps.reinforcement.settings import PAPERS
from megatron.config import ConfigError
from megatron.config.flags import Setting
from megatron.config.run import resolve
from megatron.training.context import RunContext

RUN = dict(
    num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=64, max_position_embeddings=64,
    micro_batch_size=4, global_batch_size=8, lr=1e-3, train_iters=3, data_path=("prompts.jsonl",),
    vocab_size=100, reward_funcs=("number",), max_completion_length=20,
)  # fmt: skip


def run_of(**given):
    values = {**RUN, **given}
    settings = {
        name: Setting(value, f"flag --{name.replace('_', '-')}")
        for name, value in values.items()
        if value is not None
    }
    return resolve(settings, 1)


def options_of(**given):
    return run_of(**given).config.section(ReinforcementConfig)


def test_a_wrong_source_of_rewards_is_named_before_weights_are_loaded():
    run = run_of(rl="grpo", reward_funcs=("nonsense",))
    context = RunContext(run, None, None)
    with pytest.raises(ConfigError, match="--reward-funcs nonsense must be FILE.py:FUNCTION"):
        FEATURE.before_engine(context)


PUBLISHED = {
    "grpo": ("grpo", "token", "group", 0.2, 0.2, 0.04, "loss", 8),
    "dr_grpo": ("dr_grpo", "token", "none", 0.2, 0.2, 0.0, "loss", 8),
    "dapo": ("dapo", "token", "group", 0.2, 0.28, 0.0, "loss", 8),
    "gspo": ("grpo", "sequence", "group", 3e-4, 4e-4, 0.0, "loss", 8),
    "rloo": ("rloo", "token", "none", 0.2, 0.2, 0.05, "reward", 4),
    "reinforce++": ("dapo", "token", "batch", 0.2, 0.2, 0.01, "reward", 1),
    "ppo": ("dapo", "token", "batch", 0.2, 0.2, 0.05, "reward", 1),
    "online-dpo": ("sigmoid", "token", "none", 0.2, 0.2, 0.1, "loss", 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_of_papers(name):
    options = options_of(rl=name)
    names = (
        "loss_type", "importance_sampling_level", "scale_rewards", "epsilon", "epsilon_high",
        "beta", "kl_in", "num_generations",
    )  # fmt: skip
    assert tuple(getattr(options, each) for each in names) == PUBLISHED[name]
    assert options.kl_estimator == ("k3" if options.kl_in == "loss" else "k1")
    assert options.overlong_buffer_len == (4 if name == "dapo" else 0)
    assert options.dynamic_sampling == (3 if name == "dapo" else 0)
    assert options.num_iterations == (4 if name == "ppo" else 1)


def test_every_algorithm_has_a_paper():
    assert set(PAPERS) == set(ALGORITHMS)
    assert run_of(rl="dapo").origins["epsilon_high"] == "derived: arXiv:2503.14476"


def test_flags_come_before_papers():
    options = options_of(rl="dapo", epsilon=0.1)
    # A bound that is given is that of both sides, as in trl.
    assert (options.epsilon, options.epsilon_high) == (0.1, 0.1)
    assert options_of(rl="grpo", beta=0.0).needs_reference is False
    assert options_of(rl="grpo", rl_staleness=1).importance_sampling_correction == "token_truncate"


@pytest.mark.parametrize(
    "given, words",
    [
        ({"rl": "grpo", "num_generations": 3}, "--global-batch-size 8 is no multiple"),
        ({"rl": "grpo", "num_generations": 1}, "2 or more"),
        ({"rl": "grpo", "gamma": 0.9}, "--gamma 0.9 has an effect with --rl ppo or reinforce"),
        ({"rl": "grpo", "reward_funcs": None}, "needs rewards"),
        ({"rl": "grpo", "reward_weights": (1.0, 2.0)}, "2 weights for 1 rewards"),
        ({"rl": "grpo", "loss_type": "sigmoid"}, "--loss-type sigmoid"),
        ({"rl": "grpo", "delta": 1.1}, "1.2"),
        ({"rl": "grpo", "beta": 0.0, "kl_in": "reward"}, "--kl-in reward has an effect"),
        ({"rl": "grpo", "max_completion_length": 64}, "leaves 0 tokens for a prompt"),
        ({"rl": "grpo", "max_prompt_length": 60}, "--max-prompt-length 60"),
        ({"rl": "grpo", "sft": True}, "--rl grpo contradicts --sft"),
        ({"rl": "grpo", "preference": "dpo"}, "--rl grpo contradicts --preference"),
        ({"rl": "grpo", "kd": True, "load_teacher": "t"}, "contradicts --kd"),
        ({"rl": "grpo", "load_teacher": "t"}, "--load-teacher t has an effect with --kd only"),
        ({"rl": "grpo", "overlong_penalty_factor": 2.0}, "--overlong-buffer-len above 0"),
        ({"rl": "grpo", "reward_clip_range": (2.0, 1.0)}, "below the second"),
        ({"rl": "grpo", "importance_sampling_clip_max": 2.0}, "has an effect with"),
        ({"rl": "grpo", "save_optim": False}, "contradicts --no-save-optim"),
        ({"rl": "grpo", "sync_ref_model": True, "reference_checkpoint": "r"}, "contradicts"),
        ({"rl": "rloo", "scale_rewards": "group"}, "--scale-rewards group"),
        ({"rl": "rloo", "importance_sampling_level": "sequence"}, "product over the tokens"),
        ({"rl": "ppo", "loss_type": "rloo"}, "every token has one"),
        ({"rl": "ppo", "dynamic_sampling": 2}, "groups of several texts"),
        ({"rl": "online-dpo", "epsilon": 0.1}, "--epsilon 0.1 has an effect with"),
        ({"rl": "online-dpo", "micro_batch_size": 1}, "--micro-batch-size 1"),
        ({"rl": "distill"}, "--reward-funcs number has an effect"),
        ({"rl": "distill", "reward_funcs": None}, "needs --load-teacher"),
        ({"num_generations": 4, "rl": None}, None),
    ],
)
def test_refusals(given, words):
    if words is None:  # what no --rl depends on is refused with the data
        assert options_of(**given).rl is None
        return
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        run_of(**given)
