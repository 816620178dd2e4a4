"""Losses of preferences against trl's trainers: the same weights, the same batch, in float32."""

import warnings

import pytest
import torch

from megatron.data.gpt_batch import GPTBatch
from megatron.families import build_model, spec_of
from megatron.features.evaluation.scoring import TEXT_SCORES
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.objective import with_preference
from megatron.features.preference.samples import PreferenceBatch
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.parallel.shard import shard_of

pytestmark = pytest.mark.proof
"""Importing trl takes longer than all the other tests of losses."""

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
TEXTS = [
    ("one two three", "four five six seven", "eight nine"),
    ("ten", "eleven twelve", "thirteen fourteen fifteen one two three"),
    ("five five five five five six", "two", "seven eight seven"),
]
JUDGED = [(prompt, better, True) for prompt, better, _ in TEXTS]
JUDGED += [(prompt, worse, False) for prompt, _, worse in TEXTS[1:]]


@pytest.fixture(scope="module")
def trl():
    trl = pytest.importorskip("trl", reason="the extra tune has what losses are compared with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield trl


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in TEXTS for part in text for word in part.split()})
    names = ["<pad>", "<eos>", *words]
    made = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="right"
    )


def llama(seed, folder, head="CausalLM", **more):
    """A Llama of theirs with wide weights, and ours with the same."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, **more,
    )  # fmt: skip
    theirs = getattr(transformers, f"LlamaFor{head}")(config)
    theirs.save_pretrained(folder)
    return theirs, *ours_in(folder)


def ours_in(folder):
    source = HuggingFaceFolder(folder)
    model = build_model(source.model)
    with torch.no_grad():
        for name, param in model.canonical_parameters():
            param.copy_(shard_of(param).cut(source.tensor(name)))
    return model, source


def gpt_batch(tokens, mask):
    """Their rows, whose answers `mask` names, as a batch that predicts these."""
    counted = mask[:, 1:].float()
    most = int(counted.sum(1).max())
    positions = (counted == 0).float().argsort(dim=1, stable=True)[:, :most]
    return GPTBatch(tokens[:, :-1], tokens[:, 1:], counted, None, None, positions)


@torch.no_grad()
def scores(model, spec, answers):
    """The log-probability of each answer."""
    state = model(TEXT_SCORES.start(spec.begin(answers)))
    return TEXT_SCORES.take(state, answers)["log_prob"].float()


def compare(ours, spec, batch, theirs, loss, source, reported):
    """The loss and what is reported, and every gradient, with the tolerance of float32: in float64
    gradients differ by 4e-9 of the largest."""
    found = ours(spec.begin(batch)).losses
    total = spec.total(found)
    total.backward()
    loss.backward()
    torch.testing.assert_close(total, loss, **CLOSE)
    for name, value in reported.items():
        assert float(found[name]) == pytest.approx(value, rel=2e-6, abs=2e-6), name
    grads = dict(theirs.named_parameters())
    largest = max(float(param.grad.abs().max()) for param in grads.values())
    assert largest > 0
    parameters = {each.ours: each for each in source.architecture.parameters(source.model)}
    for name, param in ours.canonical_parameters():
        expected = parameters[name].from_hf([grads[n].grad for n in parameters[name].theirs])
        difference = float((param.grad[: len(expected)] - expected).abs().max())
        assert difference <= 5e-6 * largest, (name, difference / largest)


def settings(trl, name, tmp_path, **options):
    package = trl.experimental if hasattr(trl, "experimental") else trl
    for module in (trl, getattr(package, name.lower(), None)):
        if module is not None and hasattr(module, f"{name}Config"):
            args = getattr(module, f"{name}Config")(
                output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False,
                per_device_train_batch_size=8, **options,
            )  # fmt: skip
            return getattr(module, f"{name}Trainer"), args
    raise AssertionError(f"trl has no {name}")


def trainer_of(trl, name, model, tokenizer, tmp_path, rows=TEXTS, ref=None, **options):
    import datasets
    import trl.experimental.cpo
    import trl.experimental.orpo  # noqa: F401

    cls, args = settings(trl, name, tmp_path, gradient_checkpointing=False, **options)
    columns = (
        ("prompt", "completion", "label") if name == "KTO" else ("prompt", "chosen", "rejected")
    )
    data = datasets.Dataset.from_list(
        [
            {
                column: f" {part}" if column in ("chosen", "rejected", "completion") else part
                for column, part in zip(columns, row, strict=True)
            }
            for row in rows
        ]
    )
    with_ref = {} if ref is None else {"ref_model": ref}
    trainer = cls(
        model=model, args=args, train_dataset=data, processing_class=tokenizer, **with_ref
    )
    trainer.model.train()
    return trainer, next(iter(trainer.get_train_dataloader()))


def metrics(trainer):
    found = getattr(trainer, "_metrics", None) or trainer._stored_metrics
    return {name: values[-1] for name, values in found["train"].items()}


def interleaved(rows):
    """Theirs are all better answers, then all worse ones."""
    return torch.stack(rows.chunk(2), 1).flatten(0, 1)


REPORTED = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
    "logps/rejected",
)  # fmt: skip
WITH_REFERENCE = {
    "dpo": ({"preference": "dpo"}, {"loss_type": ["sigmoid"]}, TEXTS),
    "dpo,sft": (
        {"preference": "dpo", "preference_beta": 0.3, "preference_sft_weight": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3}, TEXTS,
    ),
    "dpo,average": (
        {"preference": "dpo", "preference_average_log_prob": True},
        {"loss_type": ["sigmoid_norm"]}, TEXTS,
    ),
    # Of a single pair their optimal transport is conservative DPO, which they lack otherwise.
    "dpo,smoothed": (
        {"preference": "dpo", "preference_label_smoothing": 0.2},
        {"loss_type": ["aot"], "label_smoothing": 0.2}, TEXTS[:1],
    ),
    "ipo": (
        {"preference": "ipo", "preference_beta": 0.2}, {"loss_type": ["ipo"], "beta": 0.2}, TEXTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WITH_REFERENCE)
def test_pairs_with_a_reference(trl, tokenizer, tmp_path, case):
    options, theirs, rows = WITH_REFERENCE[case]
    model, ours, source = llama(0, tmp_path / "model")
    reference, our_reference, _ = llama(1, tmp_path / "reference")
    trainer, inputs = trainer_of(trl, "DPO", model, tokenizer, tmp_path, rows, reference, **theirs)
    answers = gpt_batch(*(interleaved(inputs[k]) for k in ("input_ids", "completion_mask")))
    spec = spec_of(source.model)
    batch = PreferenceBatch(answers, scores(our_reference, spec, answers))
    loss = trainer.compute_loss(trainer.model, inputs)
    compare(
        ours, specified(spec, source, options), batch, model, loss, source,
        {name: metrics(trainer)[name] for name in REPORTED},
    )  # fmt: skip


def specified(spec, source, options):
    """The spec of a run with these options."""

    class Run:
        model = source.model

        @staticmethod
        def section(cls):
            return PreferenceConfig(**options)

    return with_preference(spec, Run)


WITHOUT_REFERENCE = {
    "orpo": ("ORPO", {"preference": "orpo", "preference_beta": 0.3}, {"beta": 0.3}),
    "simpo": (
        "CPO", {"preference": "simpo", "simpo_gamma": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
    ),
    "simpo,sft": (
        "CPO", {"preference": "simpo", "preference_sft_weight": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_REFERENCE)
def test_pairs_alone(trl, tokenizer, tmp_path, case):
    name, options, theirs = WITHOUT_REFERENCE[case]
    model, ours, source = llama(0, tmp_path / "model")
    trainer, inputs = trainer_of(trl, name, model, tokenizer, tmp_path, max_length=64, **theirs)
    both = trainer.concatenated_inputs(inputs, padding_value=0)
    mask = (both["concatenated_labels"] != -100).long()
    answers = gpt_batch(interleaved(both["concatenated_input_ids"]), interleaved(mask))
    loss, found = trainer.get_batch_loss_metrics(trainer.model, inputs)
    spec = specified(spec_of(source.model), source, options)
    reported = {name: float(found[name]) for name in REPORTED}
    compare(ours, spec, PreferenceBatch(answers), model, loss, source, reported)


def test_kto(trl, tokenizer, tmp_path):
    model, ours, source = llama(0, tmp_path / "model")
    reference, our_reference, _ = llama(1, tmp_path / "reference")
    trainer, inputs = trainer_of(
        trl, "KTO", model, tokenizer, tmp_path, JUDGED, reference, beta=0.05,
        desirable_weight=1.2, undesirable_weight=0.9,
    )  # fmt: skip
    width = max(inputs["input_ids"].shape[1], inputs["KL_input_ids"].shape[1])

    def rows(name):
        both = [inputs[name], inputs[f"KL_{name}"]]
        both = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in both]
        return torch.stack(both, 1).flatten(0, 1)

    answers = gpt_batch(rows("input_ids"), rows("completion_mask"))
    spec = spec_of(source.model)
    desirable = inputs["label"].bool().repeat_interleave(2)
    batch = PreferenceBatch(answers, scores(our_reference, spec, answers), desirable)
    loss = trainer.compute_loss(trainer.model, inputs)
    options = {
        "preference": "kto", "preference_beta": 0.05, "kto_desirable_weight": 1.2,
        "kto_undesirable_weight": 0.9,
    }  # fmt: skip
    spec = specified(spec, source, options)
    compare(ours, spec, batch, model, loss, source, {"rewards/kl": metrics(trainer)["kl"]})
    assert metrics(trainer)["kl"] >= 0


@pytest.mark.parametrize("margins", [None, (0.5, 2.0, 0.0)])
def test_rewards(trl, tokenizer, tmp_path, margins):
    model, ours, source = llama(0, tmp_path / "model", "SequenceClassification", num_labels=1)
    trainer, inputs = trainer_of(trl, "Reward", model, tokenizer, tmp_path, max_length=64)
    if margins is not None:
        inputs["margin"] = torch.tensor(margins)
    tokens, lengths = inputs["input_ids"], inputs["attention_mask"].sum(1)
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    better, worse = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    pairs = [row.numpy() for pair in zip(better, worse, strict=True) for row in pair]
    batch = PreferenceBatch(GPTBatch.ended(pairs, tokens.shape[1]))
    if margins is not None:
        batch = batch._replace(margin_R=inputs["margin"].repeat_interleave(2))
    spec = specified(spec_of(source.model), source, {"preference": "reward"})
    loss = trainer.compute_loss(trainer.model, inputs)
    reported = metrics(trainer)
    compare(
        ours, spec, batch, model, loss, source,
        {"rewards/accuracies": reported["accuracy"], "rewards/margins": reported["margin"]},
    )  # fmt: skip
