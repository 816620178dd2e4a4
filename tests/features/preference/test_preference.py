"""Losses of preferences on a small GPT against their formulas, from whole log-softmaxes in float64.
test_against_trl.py has trl's trainers."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from configs import model_config

from megatron.config import ConfigError
from megatron.data.gpt_batch import GPTBatch
from megatron.data.texts import ScoredText
from megatron.families import build_model, spec_of
from megatron.features.evaluation.scoring import TEXT_SCORES
from megatron.features.masked.batch import T5Batch
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.objective import compare_ahead, with_preference
from megatron.features.preference.samples import PreferenceBatch
from megatron.model.layer_list import initialise
from megatron.parallel.shard import Init

VOCAB, LENGTH = 31, 12
PROMPTS = [[3, 4, 5], [6], [7, 8]]
ANSWERS = [([9, 10], [11, 12, 13, 1]), ([14, 15, 16], [17]), ([18, 1], [19, 20, 1])]
TOKENS = torch.tensor([2, 4, 3, 1, 2, 3])
REFERENCE = torch.tensor([-9.0, -14.0, -11.0, -3.5, -6.0, -12.0])
DESIRABLE = torch.tensor([True, True, False, False, True, True])


class Run:
    """What of a run's configuration a loss depends on."""

    def __init__(self, model, **options):
        self.model, self.options = model, options

    def section(self, cls):
        assert cls is PreferenceConfig
        return cls(**self.options)


@cache
def model():
    config = model_config(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=LENGTH,
        hidden_dropout=0.0, attention_dropout=0.0,
    ).with_vocabulary(VOCAB)  # fmt: skip
    network = build_model(config).double()
    for name, param in network.canonical_parameters():
        param.init = Init(std=0.5)
        initialise(name, param, 1)
    return config, network


def texts():
    return [
        ScoredText(torch.tensor(prompt).numpy(), torch.tensor(answer).numpy())
        for prompt, pair in zip(PROMPTS, ANSWERS, strict=True)
        for answer in pair
    ]


def batch(**changes):
    made = PreferenceBatch(GPTBatch.scoring(texts(), LENGTH), REFERENCE, DESIRABLE)
    return made._replace(**changes)


def losses(options, found=None):
    config, network = model()
    spec = with_preference(spec_of(config), Run(config, **options))
    network.zero_grad()
    numbers = network(spec.begin(found or batch())).losses
    assert numbers.keys() == spec.losses.keys()
    assert all(numbers[name].requires_grad == (weight > 0) for name, weight in spec.losses.items())
    return spec, numbers


def log_probs():
    """Of each answer, and of each prompt with its answer: sums over whole log-softmaxes, with their
    numbers of tokens."""
    config, network = model()
    answers, both, lengths = [], [], []
    for text in texts():
        tokens = torch.from_numpy(text.context).tolist() + text.continuation.tolist()
        rows = spec_of(config).begin(GPTBatch.scoring([text], len(tokens) - 1))
        logits = network(rows.changed(targets=None)).hidden[0, :, :VOCAB]
        scores = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
        answers.append(scores[len(text.context) - 1 :].sum())
        both.append(scores.sum())
        lengths.append(len(scores))
    return torch.stack(answers), torch.stack(both), torch.tensor(lengths)


def pairs(values):
    return values[0::2], values[1::2]


def by_definition(options):
    """The minimised number."""
    answers, both, lengths = log_probs()
    kind, config = options["preference"], PreferenceConfig(**options)
    beta, ratios = config.beta, answers - REFERENCE
    sft = -answers[0::2].sum() / TOKENS[0::2].sum() * config.preference_sft_weight
    if kind == "dpo":
        if config.preference_average_log_prob:
            ratios = ratios / TOKENS
        better, worse = pairs(ratios)
        right = 1 / (1 + (-beta * (better - worse)).exp())
        wrong = config.preference_label_smoothing
        return (-(1 - wrong) * right.log() - wrong * (1 - right).log()).mean() + sft
    if kind == "ipo":
        better, worse = pairs(ratios / TOKENS)
        return ((better - worse - 1 / (2 * beta)) ** 2).mean() + sft
    if kind == "simpo":
        better, worse = pairs(answers / TOKENS)
        return -F.logsigmoid(beta * (better - worse) - config.simpo_gamma).mean() + sft
    if kind == "orpo":
        p = (answers / TOKENS).exp()
        better, worse = pairs(p / (1 - p))
        odds = -F.logsigmoid((better / worse).log()).mean()
        return -both[0::2].sum() / lengths[0::2].sum() + beta * odds
    own, other = pairs(ratios)
    kl = other.mean().clamp(min=0).detach()
    good = DESIRABLE[0::2]
    value = torch.where(good, torch.sigmoid(beta * (own - kl)), torch.sigmoid(beta * (kl - own)))
    weight = torch.where(good, config.kto_desirable_weight, config.kto_undesirable_weight)
    return (weight * (1 - value)).mean()


CASES = {
    "dpo": {"preference": "dpo"},
    "dpo,conservative": {
        "preference": "dpo", "preference_label_smoothing": 0.2, "preference_beta": 0.5,
    },
    "dpo,average,sft": {
        "preference": "dpo", "preference_average_log_prob": True, "preference_sft_weight": 0.7,
    },
    "ipo": {"preference": "ipo", "preference_sft_weight": 0.2},
    "simpo": {"preference": "simpo", "simpo_gamma": 0.3},
    "orpo": {"preference": "orpo", "preference_beta": 0.4},
    "kto": {"preference": "kto", "preference_beta": 0.05, "kto_undesirable_weight": 0.6},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_the_formula(case):
    """The number that is minimised, and every gradient."""
    spec, numbers = losses(CASES[case])
    _, network = model()
    total, expected = spec.total(numbers), by_definition(CASES[case])
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
    params = list(network.parameters())
    found, wanted = (torch.autograd.grad(each, params) for each in (total, expected))
    largest = max(float(each.abs().max()) for each in wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-12 * largest


@pytest.mark.parametrize("case", ["dpo", "ipo", "simpo", "orpo"])
def test_reported_for_pairs(case):
    """As trl reports them: rewards are beta times the log-ratio of whole answers, or the mean
    log-probability without a reference."""
    _, numbers = losses(CASES[case])
    answers, config = log_probs()[0].detach(), PreferenceConfig(**CASES[case])
    seen = answers if config.needs_reference else answers / TOKENS
    rewards = config.beta * (answers - REFERENCE if config.needs_reference else seen)
    (better, worse), (of_better, of_worse) = pairs(rewards), pairs(seen)
    expected = {
        "rewards/chosen": better.mean(), "rewards/rejected": worse.mean(),
        "rewards/margins": (better - worse).mean(),
        "rewards/accuracies": (better > worse).double().mean(),
        "logps/chosen": of_better.mean(), "logps/rejected": of_worse.mean(),
    }  # fmt: skip
    for name, value in expected.items():
        assert float(numbers[name]) == pytest.approx(float(value), rel=1e-12), name


def test_reported_for_judged_answers():
    _, numbers = losses(CASES["kto"])
    own, other = pairs(log_probs()[0].detach() - REFERENCE)
    kl = max(0.0, float(other.mean()))
    margins = 0.05 * (own - kl) * torch.tensor([1.0, -1.0, 1.0])
    assert float(numbers["rewards/kl"]) == pytest.approx(kl)
    assert float(numbers["rewards/margins"]) == pytest.approx(float(margins.mean()))
    assert float(numbers["rewards/accuracies"]) == pytest.approx(
        float((margins > 0).mean(dtype=float))
    )


def test_the_reference_point_of_kto_is_clamped():
    """A divergence is not negative; its estimate may be."""
    low = batch(reference_R=REFERENCE + 100)
    assert float(losses(CASES["kto"], low)[1]["rewards/kl"]) == 0.0
    high, other = (
        batch(reference_R=REFERENCE - 100),
        log_probs()[0].detach()[1::2] - REFERENCE[1::2],
    )
    kl = float(losses(CASES["kto"], high)[1]["rewards/kl"])
    assert kl == pytest.approx(100 + float(other.mean()))


class OneProcess:
    """As much of an engine as a step of kto asks for before its first pass."""

    def __init__(self, spec, network):
        self.spec, self.network, self.backend = spec, network, self

    def prepare_evaluation(self):
        self.network.eval()

    def evaluate(self, batches, count, measure):
        assert not torch.is_grad_enabled()
        found = []
        for each in (next(batches) for _ in range(count)):
            found.append(measure.of(self.network(measure.start(self.spec.begin(each))), each))
        return found


def test_what_kto_compares_with_takes_no_backward_pass():
    """Computed ahead of the step, from half of the rows; numbers and gradients stay the same."""
    config, network = model()
    spec, together = losses(CASES["kto"])
    engine = OneProcess(spec, network)
    compare_ahead(engine)
    (ahead,) = engine.look_ahead(iter([batch()]), 1)
    assert len(ahead.answers.tokens_BS) * 2 == len(batch().answers.tokens_BS)
    apart = network.train()(spec.begin(ahead)).losses
    assert {name: float(loss.detach()) for name, loss in apart.items()} == pytest.approx(
        {name: float(loss.detach()) for name, loss in together.items()}, rel=1e-12
    )
    params = list(network.parameters())
    found, wanted = (torch.autograd.grad(spec.total(each), params) for each in (apart, together))
    largest = max(float(each.abs().max()) for each in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * largest


def test_a_model_that_is_its_reference():
    """Every run starts so: the loss is log 2, and the rewards are zero."""
    own = log_probs()[0].detach()
    _, numbers = losses(CASES["dpo"], batch(reference_R=own))
    assert float(numbers["dpo loss"]) == pytest.approx(math.log(2))
    assert float(numbers["rewards/margins"]) == pytest.approx(0.0, abs=1e-12)
    _, numbers = losses(CASES["ipo"] | {"preference_sft_weight": 0.0}, batch(reference_R=own))
    assert float(numbers["ipo loss"]) == pytest.approx(25.0)


def test_prompts_do_not_count():
    """Other log-probabilities of a prompt's own tokens change nothing but orpo's cross entropy."""
    answers = GPTBatch.scoring(texts(), LENGTH)
    changed = answers.labels_BS.clone()
    changed[answers.loss_mask_BS == 0] = 30
    other = batch(answers=answers._replace(labels_BS=changed))
    for case, options in CASES.items():
        (_, before), (_, after) = losses(options), losses(options, other)
        assert (before["lm loss"] != after["lm loss"]) if case == "orpo" else before == after


def test_a_t5_reads_the_prompt_in_its_encoder():
    """Log-probabilities are those of its decoder's targets; tests/distributed/parity trains it."""
    config = model_config(
        family="t5", num_layers=2, decoder_num_layers=2, encoder_decoder=True, hidden_size=16,
        num_attention_heads=2, seq_length=LENGTH, decoder_seq_length=8, hidden_dropout=0.0,
        attention_dropout=0.0,
    ).with_vocabulary(VOCAB)  # fmt: skip
    network = build_model(config).double()
    for name, param in network.canonical_parameters():
        initialise(name, param, 1)
    answers = T5Batch.scoring(texts(), (LENGTH, 8), 0)
    spec = with_preference(spec_of(config), Run(config, preference="dpo"))
    with torch.no_grad():
        state = network(TEXT_SCORES.start(spec_of(config).begin(answers)))
    own = TEXT_SCORES.take(state, answers)["log_prob"]
    numbers = network(spec.begin(PreferenceBatch(answers, own))).losses
    assert float(numbers["dpo loss"]) == pytest.approx(math.log(2), rel=1e-6)
    assert float(numbers["logps/chosen"]) == pytest.approx(float(own[0::2].mean()))


def test_an_encoder_is_refused():
    config = model_config(family="bert", num_layers=1, hidden_size=16, num_attention_heads=2)
    config = config.with_vocabulary(VOCAB)
    with pytest.raises(ConfigError, match="--preference dpo: a model of the family bert predicts"):
        with_preference(spec_of(config), Run(config, preference="dpo"))
