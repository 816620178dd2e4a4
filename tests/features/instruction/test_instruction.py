"""Training on examples against transformers, which computes them one by one."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

from megatron.config import RunConfig
from megatron.data.gpt_batch import GPTCollator
from megatron.data.samples import PackedSample
from megatron.families import build_model, trained_spec
from megatron.features.instruction.batches import ExampleCollator, Padding, example_lengths
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.objective import EmbeddingNoise
from megatron.features.keep_best.callback import BestEvaluation
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.training.metrics import Evaluation
from megatron.training.trainer import weighed_step

VOCABULARY, LENGTH, PAD = 96, 24, 95
EXAMPLES = ((9, 4), (3, 1), (12, 2), (5, 4), (7, 6), (11, 3))
"""Tokens of each, and the first that counts."""
SPREAD = 0.3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Llama of transformers and ours with its weights, in float64."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64,
        initializer_range=SPREAD, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    source = HuggingFaceFolder(folder)
    ours = build_model(source.model)
    with torch.no_grad():
        for name, param in ours.canonical_parameters():
            param.copy_(shard_of(param).cut(source.tensor(name)))
    return theirs.double(), ours.double(), source.model


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(5)
    return [(rng.integers(0, PAD, n), np.arange(n) >= first) for n, first in EXAMPLES]


def packed(examples, capacity=None):
    """One sample of several examples."""
    tokens = np.concatenate([tokens for tokens, _ in examples])
    counted = np.concatenate([counted for _, counted in examples])
    documents = np.repeat(np.arange(len(examples)), [len(tokens) for tokens, _ in examples])
    missing = (capacity or len(tokens)) - len(tokens)
    ends = ((tokens, PAD), (counted.astype(np.float32), 0.0), (documents, len(examples)))
    tokens, counted, documents = (
        np.pad(part, (0, missing), constant_values=end) for part, end in ends
    )
    return PackedSample(tokens, counted[1:].copy(), documents[:-1].copy())


CUTS = {
    "one micro batch": [[[0], [1], [2], [3], [4], [5]]],
    "two": [[[0], [1], [2]], [[3], [4], [5]]],
    "six": [[[0]], [[1]], [[2]], [[3]], [[4]], [[5]]],
    "packed": [[[0, 2], [1, 3, 4]], [[5]]],
}
"""Micro batches of samples of examples."""


def step_of(examples, cut, by, head_multiple=4):
    """The micro batches of a step, with their weights."""
    is_packed = any(len(sample) > 1 for micro in cut for sample in micro)
    padding = None if is_packed else Padding(PAD)
    collate = ExampleCollator(GPTCollator(), padding, by, head_multiple)
    capacity = LENGTH if is_packed else None
    batches = [
        collate([packed([examples[n] for n in sample], capacity) for sample in micro])
        for micro in cut
    ]
    relative, counts = weighed_step(iter(batches), len(batches), Mesh(), torch.device("cpu"))
    assert counts.trained == sum(counted.sum() for _, counted in examples)
    return list(relative)


def spec_with(model, **flags):
    flags = InstructionConfig(sft=True, **flags)
    return trained_spec(RunConfig(model=replace(model, seq_length=LENGTH), sections=(flags,)))


def trained(models, batches, **flags):
    """The numbers of a step, and the gradients of all parameters."""
    _, model, config = models
    spec = spec_with(config, **flags)
    model.train()
    model.zero_grad()
    sums = dict.fromkeys(spec.losses, 0.0)
    for number, batch in enumerate(batches):
        losses = model(spec.begin(batch).changed(dropout_seed=number)).losses
        (spec.total(losses) / len(batches)).backward()
        sums = {name: sums[name] + float(loss.detach()) for name, loss in losses.items()}
    means = {name: total / len(batches) for name, total in sums.items()}
    return means, {name: p.grad.clone() for name, p in model.canonical_parameters()}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("by", ["tokens", "examples"])
def test_a_step_equals_examples_one_by_one(by, cut, models, examples):
    """Whatever the padding, the packing and the micro batches: neighbours are invisible, positions
    begin again, and tokens or examples count equally."""
    theirs, _, _ = models
    theirs.zero_grad()
    total, correct, tokens = 0.0, 0, sum(counted[1:].sum() for _, counted in examples)
    for ids, counted in examples:
        logits = theirs(torch.from_numpy(ids)[None]).logits[0, :-1]
        labels, mask = torch.from_numpy(ids[1:]), torch.from_numpy(counted[1:])
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")[mask]
        total = total + (losses.mean() / len(examples) if by == "examples" else
                         losses.sum() / tokens)  # fmt: skip
        correct += int(((logits.argmax(-1) == labels) & mask).sum())
    total.backward()
    batches = step_of(examples, CUTS[cut], by)
    found, gradients = trained(models, batches, sft_loss_weights=by, log_token_accuracy=True)
    assert found["lm loss"] == pytest.approx(total.item(), rel=2e-8)  # weights are float32
    assert found["token accuracy"] == pytest.approx(correct / tokens, rel=1e-12)
    inner = theirs.model
    for name, param in (
        ("embedding.word_embeddings.weight", inner.embed_tokens.weight),
        ("layers.0.attention.proj.weight", inner.layers[0].self_attn.o_proj.weight),
        ("layers.1.mlp.down.weight", inner.layers[1].mlp.down_proj.weight),
        ("output_layer.weight", theirs.lm_head.weight),
    ):
        largest = param.grad.abs().max()  # transformers' norms are in float32
        torch.testing.assert_close(
            gradients[name][:VOCABULARY], param.grad, rtol=0, atol=float(2e-6 * largest)
        )


@pytest.mark.parametrize("cut", ["two", "packed"])
def test_the_head_computes_positions_that_count(cut, models, examples):
    """Rounded up to a multiple, and with the numbers and gradients of a head that computes all."""
    some, every = (step_of(examples, CUTS[cut], "tokens", n) for n in (4, None))
    flags = {"sft_loss_weights": "tokens", "log_token_accuracy": True}
    found, gradients = trained(models, some, **flags)
    expected, full = trained(models, every, **flags)
    assert found == pytest.approx(expected, rel=1e-12)
    for name, gradient in full.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-11, atol=1e-14)
    assert all(batch.positions_BP is None for batch in every)
    shorter = [batch for batch in some if batch.positions_BP is not None]
    assert shorter
    for batch in (*shorter, *(each.lengthened(LENGTH) for each in shorter)):
        count = int((batch.loss_mask_BS > 0).sum())
        assert batch.positions_BP.shape == (1, -(-count // 4) * 4)
        assert count <= batch.positions_BP.shape[1] < batch.tokens_BS.numel()
        counted = batch.loss_mask_BS.view(1, -1).gather(1, batch.positions_BP)
        assert counted.sum() == batch.loss_mask_BS.sum()


def test_evaluations_do_not_depend_on_micro_batches(models, examples):
    _, model, config = models
    model.eval()
    found = []
    for cut in CUTS.values():
        batches = step_of(examples, cut, "tokens")
        measure = spec_with(config, sft_loss_weights="tokens").evaluated
        with torch.no_grad():
            numbers = [
                measure.of(model(measure.start(spec_with(config).begin(batch))), batch)
                for batch in batches
            ]
        means = torch.stack(numbers).mean(0).tolist()
        found.append(measure.report(dict(zip(measure.names, means, strict=True))))
    step = step_of(examples, CUTS["six"], "tokens")
    means, _ = trained(models, step, sft_loss_weights="tokens", log_token_accuracy=True)
    for numbers in found:
        assert numbers == pytest.approx(means, rel=1e-9)


def test_noise_is_that_of_the_paper_and_not_of_padding(models, examples):
    _, _, config = models
    batch = step_of(examples, CUTS["one micro batch"], "tokens")[0]
    lengths_BS = example_lengths(batch)
    assert lengths_BS[:, 0].tolist() == [n - 1 for n, _ in EXAMPLES]  # inputs
    packed_lengths = example_lengths(step_of(examples, CUTS["packed"], "tokens")[0])
    assert packed_lengths[1, :15].tolist() == [3] * 3 + [5] * 5 + [7] * 7
    hidden = 64
    embeddings = torch.zeros(*lengths_BS.shape, hidden)
    noise = EmbeddingNoise(5.0, LENGTH, lengths_BS).drawn(embeddings, 7, TensorParallel())
    module = SimpleNamespace(training=True, neftune_noise_alpha=5.0)
    for row, (length, _) in enumerate(EXAMPLES):
        theirs = neftune_post_forward_hook(module, None, embeddings[row : row + 1, : length - 1])
        most = 5.0 / ((length - 1) * hidden) ** 0.5
        assert float(theirs.abs().max()) <= most
        assert 0.9 * most < float(noise[row].abs().max()) <= most
        # A uniform distribution's standard deviation.
        assert float(noise[row].std()) == pytest.approx(most / 3**0.5, rel=0.1)
    longer = batch.lengthened(LENGTH)
    again = EmbeddingNoise(5.0, LENGTH, example_lengths(longer))
    same = again.drawn(torch.zeros(*longer.tokens_BS.shape, hidden), 7, TensorParallel())
    assert torch.equal(same[:, : noise.shape[1]], noise)


def test_noise_is_added_in_training_only(models, examples):
    _, model, config = models
    batches = step_of(examples, CUTS["two"], "tokens")
    plain, noisy, again, other = (
        trained(models, batches, **flags)[0]["lm loss"]
        for flags in ({}, {"neftune_noise_alpha": 5.0}, {"neftune_noise_alpha": 5.0},
                      {"neftune_noise_alpha": 1.0})
    )  # fmt: skip
    assert noisy == again
    assert len({plain, noisy, other}) == 3
    model.eval()
    begin = spec_with(config, neftune_noise_alpha=5.0).begin(batches[0])
    with torch.no_grad():
        states = begin.changed(dropout_seed=3), begin.changed(noise=None)
        losses = [float(model(state).losses["lm loss"]) for state in states]
    assert losses[0] == losses[1]


class Saves:
    def __init__(self):
        self.iterations = []

    def save(self, iteration, consumed_samples):
        self.iterations.append(iteration)


def evaluated(follow, losses, every=10):
    """Why a run ends with these validation losses."""
    weights = {"lm loss": 1.0, "token accuracy": 0.0}
    spec = SimpleNamespace(losses=weights, training_only=frozenset())
    for place, loss in losses:
        trainer = SimpleNamespace(
            iteration=place * every, consumed_samples=place, at_end=False,
            engine=SimpleNamespace(spec=spec),
        )  # fmt: skip
        numbers = {"lm loss": loss, "token accuracy": 1.0 / place}
        follow.evaluated(trainer, Evaluation(trainer.iteration, numbers))
        follow.evaluated(trainer, Evaluation(trainer.iteration, {"lm loss": 0.0}, test=True))
        follow.evaluate(trainer, False)
        if reason := follow.reason_to_stop(trainer):
            return trainer.iteration, reason
    return None


def test_the_best_evaluation_is_kept_and_ends_a_run(tmp_path):
    saves = Saves()
    first = BestEvaluation(saves, Mesh(), str(tmp_path), True, 2, 0)
    assert evaluated(first, [(1, 3.0), (2, 2.0), (3, float("nan"))]) is None
    assert saves.iterations == [10, 20]
    content = json.loads((tmp_path / "best_epoch.json").read_text())
    assert (content["checkpoint"], content["value"]) == ("global_step20", 2.0)
    # As a run that continues from a checkpoint, which knows of the evaluations before it.
    resumed = BestEvaluation(saves, Mesh(), str(tmp_path), True, 2, 30)
    stopped = evaluated(resumed, [(4, 2.5)])
    assert stopped is not None and stopped[0] == 40
    assert (
        "--early-stopping-patience 2: the validation loss was lowest, 2.000000, after iter"
        in (stopped[1])
    )
    earlier = BestEvaluation(saves, Mesh(), str(tmp_path), True, None, 15)
    assert earlier.losses == {10: 3.0}
    assert evaluated(earlier, [(2, 9.0), (3, 8.0), (4, 7.0)]) is None
    assert saves.iterations == [10, 20]
    (tmp_path / "best_epoch.json").write_text("{")
    with pytest.raises(ValueError, match=r"best_epoch\.json cannot be read; delete it"):
        BestEvaluation(saves, Mesh(), str(tmp_path), True, None, 15)
