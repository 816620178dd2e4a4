"""Losses, advantages and gradients of reinforcement learning against trl's trainers: the same
weights, prompts, completions and rewards."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import reinforcement_flags
import torch

from megatron.apps.reinforcement.advantages import Texts, estimate
from megatron.apps.reinforcement.distill import with_texts_taught
from megatron.apps.reinforcement.episodes import EpisodeBatch
from megatron.apps.reinforcement.losses import ENTROPY, KL
from megatron.apps.reinforcement.objective import with_reinforcement
from megatron.config import RunConfig
from megatron.data.gpt_batch import GPTBatch
from megatron.data.texts import ScoredText
from megatron.families import build_model, spec_of
from megatron.features.distillation.divergence import TeacherHead
from megatron.features.distillation.objective import TaughtBatch
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.parallel.shard import shard_of

pytestmark = pytest.mark.proof
"""Importing trl takes longer than all the other tests of losses."""

VOCABULARY, END, LONGEST, MOST = 32, 1, 8, 11
GROUPS, SIZE = 3, 4
options_of = partial(reinforcement_flags.options_of, max_completion_length=MOST)
NAN = float("nan")


@pytest.fixture(scope="module")
def trl():
    trl = pytest.importorskip("trl", reason="the extra tune has what losses are compared with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl.experimental.gkd
        import trl.experimental.online_dpo  # noqa: F401

        yield trl


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *(f"w{n}" for n in range(2, VOCABULARY))]
    made = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def llama(seed, folder):
    """A Llama of theirs with wide weights in float64, and ours with the same."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None, eos_token_id=END,
        pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(folder)
    theirs.config._name_or_path = str(folder)  # from which trl makes a reference
    source = HuggingFaceFolder(folder)
    model = build_model(source.model)
    with torch.no_grad():
        for name, param in model.canonical_parameters():
            param.copy_(shard_of(param).cut(source.tensor(name)))
    theirs.double().model.rotary_emb = Rotations(config)
    for module in theirs.modules():
        if type(module).__name__ == "LlamaRMSNorm":  # which rounds to float32, too
            module.forward = partial(normalised, module)
    return theirs, model.double(), source


def normalised(norm, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


class Rotations(torch.nn.Module):
    """Theirs in float64, which they round to float32."""

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size // config.num_attention_heads
        base = config.rope_parameters["rope_theta"]
        self.rates = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)

    def forward(self, x, position_ids):
        angles = (position_ids[..., None] * self.rates).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class Rollout:
    """Prompts, each with a group of completions, of which some were cut off."""

    def __init__(self, seed, groups=GROUPS, size=SIZE):
        random = np.random.default_rng(seed)
        self.prompts, self.completions = [], []
        for _ in range(groups):
            prompt = random.integers(2, VOCABULARY, random.integers(2, 7)).tolist()
            for _ in range(size):
                completion = random.integers(2, VOCABULARY, random.integers(1, LONGEST)).tolist()
                ends = random.random() < 0.7
                completion = [*completion, END] if ends else completion + [5] * LONGEST
                self.prompts.append(prompt)
                self.completions.append(completion[:LONGEST])
        count = len(self.prompts)
        self.groups = np.repeat(np.arange(groups), size)
        self.rewards = random.integers(0, 4, count) / 2 + random.random(count) * (self.groups != 1)
        self.ended = np.array([completion[-1] == END for completion in self.completions])
        self.lengths = np.array([len(completion) for completion in self.completions])

    def noise(self, seed, scale):
        """[E, L] for tokens of the completions, 0 after them."""
        random = np.random.default_rng(seed)
        noise = torch.from_numpy(random.normal(0, scale, (len(self.prompts), LONGEST)))
        return noise * (torch.arange(LONGEST) < torch.from_numpy(self.lengths)[:, None])

    def placed(self, values_EL, length):
        """Numbers of completions' tokens at the places where these are predicted."""
        placed = torch.zeros((len(self.prompts), length), dtype=torch.float64)
        for row, (prompt, count) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            values = values_EL[row]
            values = values[:count] if values.dim() else values
            placed[row, len(prompt) - 1 : len(prompt) - 1 + count] = values
        return placed

    def batch(self, options, rewards=None, old=None, sampled=None, reference=None):
        """Inputs of training that are made of them."""
        texts = Texts(
            self.rewards if rewards is None else rewards, self.groups, self.lengths, self.ended,
            None if reference is None or options.kl_in == "loss" else reference[1],
        )  # fmt: skip
        found = estimate(texts, options)
        rows = [
            ScoredText(np.array(prompt), np.array(completion))
            for prompt, completion in zip(self.prompts, self.completions, strict=True)
        ]
        length = max(len(r.context) + len(r.continuation) for r in rows) - 1
        answers = GPTBatch.scoring(rows, length)
        advantages = torch.zeros((len(rows), LONGEST), dtype=torch.float64)
        for row, values in enumerate(found.advantages):
            advantages[row, : len(values)] = torch.from_numpy(values)

        def placed(values):
            return None if values is None else self.placed(values, length)

        kept = torch.from_numpy(found.kept_E)
        counted = float((torch.from_numpy(self.lengths) * kept).sum())
        return found, EpisodeBatch(
            answers,
            self.placed(advantages, length),
            torch.zeros_like(answers.loss_mask_BS) if sampled is None else placed(sampled),
            placed(old),
            None if reference is None else placed(reference[0]),
            kept_B=kept,
            weights_2=torch.tensor([1.0, 1.0 if counted else 0.0]),
        )


def trainer_of(trl, cls, model, tokenizer, folder, rewards, reference=None, **given):
    import datasets

    config, trainer = getattr(trl, f"{cls}Config"), getattr(trl, f"{cls}Trainer")
    args = config(
        output_dir=str(folder / "out"), report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=GROUPS * SIZE, max_completion_length=MOST,
        gradient_checkpointing=False, num_generations=SIZE, **given,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": f"w{n + 2}"} for n in range(GROUPS)])
    made = trainer(
        model=model, args=args, train_dataset=data, processing_class=tokenizer,
        reward_funcs=[lambda prompts, **_: [0.0] * len(prompts)],
    )  # fmt: skip
    # Theirs in float64: they round rewards to float32.
    given = torch.from_numpy(rewards)[:, None]
    made._calculate_rewards = lambda *_: given
    made.reward_weights = made.reward_weights.double()
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    if reference is not None:
        made.ref_model = reference
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(reference, temperature=made.temperature)
    return made


def generated(trainer, cls, rollout, sampled=None):
    """Their inputs of a training step on these texts."""
    texts = ["text"] * len(rollout.prompts)
    parts = [rollout.prompts, rollout.completions]
    if cls == "GRPO":
        logps = None if sampled is None else [
            sampled[row, :count].tolist() for row, count in enumerate(rollout.lengths)
        ]  # fmt: skip
        answer = (*parts, None, texts, logps, {}, None, None)
    else:
        answer = (*parts, texts)
    trainer._generate = lambda prompts: answer
    return trainer._generate_and_score_completions([{"prompt": "w2"} for _ in texts])


def compare(ours, options, batch, theirs, loss, source):
    """The loss and every gradient."""
    config = RunConfig(source.model).with_sections(options)
    change = with_texts_taught if options.rl == "distill" else with_reinforcement
    spec = change(spec_of(config.model, config.parallel), config)
    found = ours(spec.begin(batch)).losses
    total = spec.total(found)
    total.backward()
    loss.backward()
    assert float(total) == pytest.approx(float(loss), rel=1e-6, abs=1e-6)
    grads = dict(theirs.named_parameters())
    largest = max(float(param.grad.abs().max()) for param in grads.values())
    assert largest > 1e-4
    parameters = {each.ours: each for each in source.architecture.parameters(source.model)}
    for name, param in ours.canonical_parameters():
        expected = parameters[name].from_hf([grads[n].grad for n in parameters[name].theirs])
        difference = float((param.grad[: len(expected)] - expected).abs().max())
        assert difference <= 1e-6 * largest, (name, difference / largest)
    return found


GRPO = {
    "grpo": ({"rl": "grpo", "beta": 0.0}, {"loss_type": "grpo"}),
    "kl": ({"rl": "grpo", "beta": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "plain kl": (
        {"rl": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "dr_grpo": ({"rl": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (
        {"rl": "dapo", "overlong_buffer_len": 0, "dynamic_sampling": 0},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "bnpo": (
        {"rl": "grpo", "beta": 0.0, "loss_type": "bnpo", "scale_rewards": "batch"},
        {"loss_type": "bnpo", "scale_rewards": "batch"},
    ),
    "cispo": (
        {"rl": "grpo", "beta": 0.0, "loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "gspo": (
        {"rl": "gspo", "epsilon": 0.02, "epsilon_high": 0.03},
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02,
            "epsilon_high": 0.03,
        },
    ),
    "gspo kl": (
        {"rl": "gspo", "beta": 0.2},
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
            "epsilon_high": 4e-4, "beta": 0.2,
        },
    ),
    "delta": (
        {"rl": "grpo", "beta": 0.0, "delta": 1.3},
        {"loss_type": "grpo", "delta": 1.3},
    ),
    "entropy": (
        {"rl": "dapo", "entropy_coef": 0.2, "overlong_buffer_len": 0, "dynamic_sampling": 0},
        {"loss_type": "dapo", "entropy_coef": 0.2, "epsilon_high": 0.28},
    ),
    "cut off": (
        {"rl": "grpo", "beta": 0.0, "mask_truncated_completions": True},
        {"loss_type": "grpo", "mask_truncated_completions": True},
    ),
    "cut off, tokens": (
        {
            "rl": "dapo", "overlong_buffer_len": 0, "dynamic_sampling": 0,
            "mask_truncated_completions": True,
        },
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
    ),
    "temperature": (
        {"rl": "grpo", "beta": 0.3, "temperature": 0.7},
        {"loss_type": "grpo", "beta": 0.3, "temperature": 0.7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRPO)
@pytest.mark.parametrize("failed", [False, True])
def test_grpo(trl, tokenizer, tmp_path, name, failed):
    given, theirs_given = GRPO[name]
    options = options_of(**given, num_generations=SIZE)
    theirs, ours, source = llama(3, tmp_path / "hf")
    reference = llama(4, tmp_path / "reference")[0]
    rollout = Rollout(5)
    if failed:  # one text of a group, and all but one of another
        rollout.rewards[[1, 8, 9, 10]] = NAN
    config = {"beta": 0.0, **theirs_given}
    trainer = trainer_of(
        trl, "GRPO", theirs, tokenizer, tmp_path, rollout.rewards,
        reference if options.needs_reference else None, **config,
    )  # fmt: skip
    inputs = generated(trainer, "GRPO", rollout)
    current = log_probs(trainer, inputs)
    old = current + rollout.noise(6, 0.3)
    inputs["old_per_token_logps"] = old
    reference_logps = inputs.get("ref_per_token_logps")
    found, batch = rollout.batch(
        options, old=old, reference=None if reference_logps is None else (reference_logps, None)
    )
    advantages = np.array([row[0] for row in found.advantages])
    np.testing.assert_allclose(advantages, inputs["advantages"].numpy(), rtol=1e-6, atol=1e-7)
    assert np.abs(advantages).max() > 0.1
    loss = trainer._compute_loss(theirs, inputs)
    losses = compare(ours, options, batch, theirs, loss, source)
    metrics = trainer._metrics["train"]
    if not options.mask_truncated_completions:  # where trl has no mean of nothing
        assert float(losses[ENTROPY]) == pytest.approx(metrics["entropy"][-1], rel=1e-6)
    if KL in losses and options.use_bias_correction_kl is False:
        assert float(losses[KL]) == pytest.approx(metrics["kl"][-1], rel=1e-6)


def log_probs(trainer, inputs):
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
        )[0]


@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_corrections_of_stale_texts(trl, tokenizer, tmp_path, mode):
    """trl corrects for the sampling of vLLM."""
    bounds = {"importance_sampling_clip_max": 1.2, "importance_sampling_clip_min": 0.7}
    options = options_of(
        rl="grpo", beta=0.0, num_generations=SIZE, importance_sampling_correction=mode,
        off_policy_mask_threshold=0.02, **bounds,
    )  # fmt: skip
    theirs, ours, source = llama(3, tmp_path / "hf")
    rollout = Rollout(5)
    trainer = trainer_of(
        trl, "GRPO", theirs, tokenizer, tmp_path, rollout.rewards, loss_type="grpo", beta=0.0,
        vllm_importance_sampling_mode=mode, off_policy_mask_threshold=0.02,
        **{f"vllm_{name}": value for name, value in bounds.items()},
    )  # fmt: skip
    current = log_probs(trainer, generated(trainer, "GRPO", rollout))
    trainer.use_vllm = True
    sampled = current + rollout.noise(7, 0.2)
    inputs = generated(trainer, "GRPO", rollout, sampled)
    inputs["old_per_token_logps"] = old = current + rollout.noise(8, 0.1)
    ratio = (old - sampled).masked_fill(inputs["completion_mask"] == 0, 0.0)
    # The ratio of the step before training on them.
    ratio = inputs["importance_sampling_ratio"]
    assert ratio.min() < 1 < ratio.max()
    inputs["old_per_token_logps"] = current
    _, batch = rollout.batch(options, old=current, sampled=sampled)
    loss = trainer._compute_loss(theirs, inputs)
    compare(ours, options, batch, theirs, loss, source)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_rloo(trl, tokenizer, tmp_path, normalised, beta):
    options = options_of(
        rl="rloo", beta=beta, num_generations=SIZE, reward_clip_range=(0.2, 1.9),
        **({"scale_rewards": "batch"} if normalised else {}),
    )  # fmt: skip
    theirs, ours, source = llama(3, tmp_path / "hf")
    reference = llama(4, tmp_path / "reference")[0]
    rollout = Rollout(5)
    rollout.rewards[[1, 8, 9, 10]] = NAN
    trainer = trainer_of(
        trl, "RLOO", theirs, tokenizer, tmp_path, rollout.rewards, reference if beta else None,
        beta=beta, normalize_advantages=normalised, reward_clip_range=[0.2, 1.9],
    )  # fmt: skip
    inputs = generated(trainer, "RLOO", rollout)
    current, differences = log_probs(trainer, inputs), None
    if beta:
        mask = inputs["completion_mask"]
        reference_logps = reference_log_probs(trainer, reference, inputs)
        differences = [
            row[:count].numpy()
            for row, count in zip((current - reference_logps) * mask, rollout.lengths, strict=True)
        ]
    noise = rollout.noise(6, 0.1)
    inputs["old_logps"] = inputs["old_logps"] + noise.sum(1)
    found, batch = rollout.batch(
        options, old=current + noise,
        reference=None if differences is None else (reference_logps, differences),
    )  # fmt: skip
    advantages = np.array([row[0] for row in found.advantages])
    np.testing.assert_allclose(advantages, inputs["advantages"].numpy(), rtol=1e-6, atol=1e-7)
    loss = trainer._compute_loss(theirs, inputs)
    compare(ours, options, batch, theirs, loss, source)


def reference_log_probs(trainer, reference, inputs):
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(
            reference,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
        )[0]


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_online_dpo(trl, tokenizer, tmp_path, loss_type):
    import datasets
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    options = options_of(
        max_completion_length=MOST,
        rl="online-dpo",
        loss_type=loss_type,
        beta=0.3,
        missing_eos_penalty=0.4,
    )
    theirs, ours, source = llama(3, tmp_path / "hf")
    reference = llama(4, tmp_path / "reference")[0]
    pairs = 6
    rollout = Rollout(5, groups=pairs, size=2)
    alike = next(n for n in range(0, 2 * pairs, 2) if rollout.ended[n] == rollout.ended[n + 1])
    rollout.rewards[alike] = rollout.rewards[alike + 1]
    args = OnlineDPOConfig(
        output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=pairs, max_new_tokens=LONGEST, gradient_checkpointing=False,
        loss_type=loss_type, beta=0.3, missing_eos_penalty=0.4, temperature=1.0,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": f"w{n + 2}"} for n in range(pairs)])
    # Theirs are all first texts, then all second ones.
    order = [*range(0, 2 * pairs, 2), *range(1, 2 * pairs, 2)]
    trainer = OnlineDPOTrainer(
        model=theirs, ref_model=reference, args=args, train_dataset=data,
        processing_class=tokenizer,
        reward_funcs=[lambda prompts, **_: rollout.rewards[order].tolist()],
    )  # fmt: skip

    def generate(*_):
        from trl.trainer.utils import pad

        prompts = [torch.tensor(rollout.prompts[row]) for row in order]
        completions = [torch.tensor(rollout.completions[row]) for row in order]
        side = {"padding_value": 0, "padding_side": "left"}
        masks = [pad([torch.ones_like(row) for row in rows], 0, s)
                 for rows, s in ((prompts, "left"), (completions, "right"))]  # fmt: skip
        return pad(prompts, **side), masks[0], pad(completions, 0, "right"), masks[1], None

    trainer._generate = generate
    losses = []
    trainer.accelerator.backward = lambda loss, **_: losses.append(loss)
    trainer.training_step(theirs, {"prompt": [f"w{n + 2}" for n in range(pairs)]})
    tokens = rollout.batch(options, reference=None)[1]
    reference_rows = scored(reference, rollout)
    tokens = tokens._replace(reference_BS=rollout.placed(reference_rows, tokens.tokens_BS.shape[1]))
    compare(ours, options, tokens, theirs, losses[0], source)


@torch.no_grad()
def scored(model, rollout):
    """Log-probabilities of the completions' tokens under a model of transformers, [E, L]."""
    rows = torch.zeros((len(rollout.prompts), LONGEST), dtype=torch.float64)
    for row, (prompt, completion) in enumerate(
        zip(rollout.prompts, rollout.completions, strict=True)
    ):
        tokens = torch.tensor([prompt + completion])
        log_probs = model(input_ids=tokens).logits[0].double().log_softmax(-1)
        predicted = log_probs[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])
        rows[row, : len(completion)] = predicted[:, 0]
    return rows


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_distillation(trl, tmp_path, beta, temperature):
    from trl.experimental.gkd import GKDTrainer

    options = options_of(
        max_completion_length=MOST, rl="distill", jsd_beta=beta, temperature=temperature
    )
    theirs, ours, source = llama(3, tmp_path / "hf")
    teacher, our_teacher, _ = llama(4, tmp_path / "teacher")
    batch = Rollout(5).batch(options)[1]
    answers = batch.answers
    logits = [model(input_ids=answers.tokens_BS).logits for model in (theirs, teacher)]
    labels = answers.labels_BS.masked_fill(answers.loss_mask_BS == 0, -100)
    loss = GKDTrainer.generalized_jsd_loss(
        logits[0], logits[1].detach(), labels, beta=beta, temperature=temperature
    )
    with torch.no_grad():
        start = spec_of(source.model, RunConfig(source.model).parallel).begin(answers)
        recorder = Recorder()
        our_teacher(start.changed(objective=recorder))
    compare(ours, options, TaughtBatch(batch, recorder.head), theirs, loss, source)


class Recorder:
    """An objective that keeps the input of a head."""

    losses = {}

    def __call__(self, inputs, batch):
        self.head = TeacherHead(inputs.x_BPH, inputs.weight_VH, inputs.bias_V, inputs.head)
        return {}


def test_ours_are_copies():
    """Two rollouts of one seed are equal: what is compared has the same inputs."""
    first, second = Rollout(5), Rollout(5)
    assert first.completions == second.completions
    assert (copy.deepcopy(first.rewards) == second.rewards).all()
