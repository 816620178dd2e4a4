"""SQuAD of whole runs: learnt, and against transformers on any layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fine_tuning_runs import run

sys.path.insert(0, str(Path(__file__).parents[2] / "apps/tasks/fine_tuning/squad"))

from bert_pairs import BLOCKS, PRE_NORM, names_in  # noqa: E402
from squad_files import WORDS, squad_content, vocabulary, write_squad  # noqa: E402
from squad_reference import slow_prediction, slow_windows  # noqa: E402

LENGTH, STRIDE, QUERY = 40, 12, 12
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "dp2": (2, []),
    "cp2": (2, ["--context-parallel-size", "2"]),
}
SIZES = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --tokenizer-type BertWordPieceLowerCase --num-workers 0 "
    f"--peak-tflops 1 --doc-stride {STRIDE} --max-query-length {QUERY} --init-method-std 0.1 "
    "--hidden-dropout 0 --attention-dropout 0 --lr-decay-style constant --no-bias-gelu-fusion "
    "--micro-batch-size 4"
).split()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("squad")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary()))
    words = [word for word in WORDS if word not in ("the", "a", "an")]
    write_squad(folder / "v1.json", squad_content(11, 2, 3, 24, chosen=words))
    write_squad(folder / "v2.json", squad_content(12, 2, 3, 24, 0.4, chosen=words))
    return folder


def command(files: Path, name: str, *more: str) -> list[str]:
    vocab = ["--vocab-file", str(files / "vocab.txt")]
    negative = ["--version-2-with-negative"] if name == "v2.json" else []
    data = ["--train-data", str(files / name), "--valid-data", str(files / name)]
    return ["--task", "SQUAD", *data, *vocab, *negative, *SIZES, *more]


def metrics_of(found) -> dict[str, float]:
    (values,) = found.results["evaluations"][-1]["tasks"].values()
    return values["metrics"]


@pytest.mark.proof
@pytest.mark.parametrize("name", ["v1.json", "v2.json"])
def test_a_small_file_is_learnt(pool, files, tmp_path, name):
    """In two epochs of 20 times the file: fewer evaluations and checkpoints than in 40 epochs."""
    said, again = tmp_path / "predictions.json", ["--train-data", *20 * [str(files / name)]]
    more = [*again, "--epochs", "2", "--lr", "4e-3", "--predictions", str(said)]
    more += ["--save", str(tmp_path / "saved"), "--save-interval", "1000"]
    found = pool.run(1, run, command(files, name, *more), tmp_path)[0]
    metrics = metrics_of(found)
    version_2 = name == "v2.json"
    assert metrics["f1"] == metrics["exact" if version_2 else "exact_match"] == 100
    predictions = json.loads(said.read_text())
    for article in json.loads((files / name).read_text())["data"]:
        for qa in article["paragraphs"][0]["qas"]:
            golds = [answer["text"] for answer in qa["answers"]] or [""]
            # As normalization sees it: the answer may begin or end with punctuation.
            words = predictions[qa["id"]].lower().replace(",", "").split()
            assert words in [gold.lower().replace(",", "").split() for gold in golds]
    n_best = json.loads((tmp_path / "nbest_predictions.json").read_text())
    assert n_best.keys() == predictions.keys()
    assert (tmp_path / "null_odds_predictions.json").exists() == version_2
    assert 'overall: {"exact' in found.printed


class Reference:
    """transformers' model with the weights of a checkpoint, asked window by window."""

    def __init__(self, folder: Path) -> None:
        transformers = pytest.importorskip("transformers")
        from megatron.checkpoint.source import open_checkpoint

        source = open_checkpoint(folder)
        config = transformers.MegatronBertConfig(
            vocab_size=len(vocabulary()), hidden_size=32, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=LENGTH,
            layer_norm_eps=1e-5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            hidden_act="gelu",
        )  # fmt: skip
        self.model = transformers.MegatronBertForQuestionAnswering(config).eval()
        theirs = dict(self.model.named_parameters())
        for name in source.names():
            weights = [theirs.pop(other) for other in names_in(PRE_NORM + BLOCKS, name)]
            whole = source.tensor(name).split([len(weight) for weight in weights])
            for weight, part in zip(weights, whole, strict=True):
                weight.data.copy_(part)
        assert not theirs

    def inputs(self, row, types):
        rest = LENGTH - len(row)
        mask = [1] * len(row) + [0] * rest
        tensors = torch.tensor([[row + [0] * rest], [types + [0] * rest], [mask]])
        return dict(zip(("input_ids", "token_type_ids", "attention_mask"), tensors, strict=True))

    @torch.no_grad()
    def predict(self, questions, tokenizer, search):
        """Text and odds for every question, and the losses of all windows."""
        from megatron.apps.tasks.fine_tuning.squad import Passage

        found, losses = {}, []
        for question in questions:
            passage, windows, logits = Passage.of(question.context, tokenizer), [], []
            for number, (row, types, span, best) in enumerate(
                slow_windows(question, tokenizer, LENGTH, STRIDE, QUERY)
            ):
                start, end = (torch.tensor([place]) for place in span)
                inputs = self.inputs(row, types)
                out = self.model(**inputs, start_positions=start, end_positions=end)
                losses.append(out.loss.item())
                pairs = torch.stack((out.start_logits[0], out.end_logits[0]), 1)
                logits.append(pairs.double().numpy())
                windows.append(
                    SimpleNamespace(
                        length=len(row), text=types.index(1), best_N=best, passage=passage,
                        first=number * STRIDE,
                    )
                )  # fmt: skip
            text, _, odds = slow_prediction(windows, logits, search)
            found[question.identity] = (text, odds)
        return found, losses


def results(pool, layout, argv, folder):
    """Predictions and metrics of a run."""
    size, parallel = LAYOUTS[layout]
    folder.mkdir()
    argv = [*argv, *parallel, "--predictions", str(folder / "predictions.json")]
    argv += [] if "--save" in argv or "--load" in argv else ["--save", str(folder / "saved")]
    found = pool.run(size, run, argv, folder)[0]
    return json.loads((folder / "predictions.json").read_text()), metrics_of(found), found.losses


@pytest.mark.proof
@pytest.mark.parametrize("name", ["v1.json", "v2.json"])
def test_against_transformers_on_any_layout(pool, files, tmp_path, name):
    from megatron.apps.tasks.fine_tuning.squad import AnswerSearch
    from megatron.apps.tasks.fine_tuning.squad_files import (
        read_questions,
        squad2_metrics,
        squad_metrics,
    )
    from megatron.features.tokenizers.wordpiece import WordPieceTokenizer

    saved = tmp_path / "saved"
    more = ["--epochs", "3", "--lr", "2e-3", "--save", str(saved), "--save-init"]
    more += ["--global-batch-size", "8", "--log-interval", "1"]
    argv = command(files, name, *more)
    *_, losses = results(pool, "one", argv, tmp_path / "trained")
    negative = name == "v2.json"
    questions = read_questions(files / name, negative)
    tokenizer = WordPieceTokenizer.from_file(files / "vocab.txt", True)
    search = AnswerSearch(with_negative=negative)

    # The loss of the first step, with the weights before it.
    before = Reference(saved / "global_step0")
    found, each = before.predict(questions, tokenizer, search)
    sampler = torch.utils.data.DistributedSampler(each, num_replicas=1, rank=0, seed=0)
    sampler.set_epoch(1234)
    first = [each[number] for number in list(sampler)[:8]]
    assert losses[0] == pytest.approx(sum(first) / 8, rel=1e-5)

    step = int((saved / "latest").read_text().removeprefix("global_step"))
    found, _ = Reference(saved / f"global_step{step}").predict(questions, tokenizer, search)
    golds = [[answer.text for answer in question.answers] for question in questions]
    texts = [text for text, _ in found.values()]
    odds = [each for _, each in found.values()]
    wanted = squad2_metrics(golds, texts, odds) if negative else squad_metrics(golds, texts)
    for layout in LAYOUTS:
        load = ["--epochs", "0", "--load", str(saved)]
        argv = command(files, name, *load)
        said, metrics, _ = results(pool, layout, argv, tmp_path / layout)
        assert said == {identity: text for identity, (text, _) in found.items()}, layout
        assert metrics == pytest.approx(wanted, rel=1e-4), layout
    assert negative or len(set(texts)) > 2


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "pp2", "dp2", "cp2"])
def test_training_on_layouts(pool, files, tmp_path, layout):
    more = ["--epochs", "2", "--lr", "2e-3", "--global-batch-size", "8", "--log-interval", "1"]
    argv = command(files, "v2.json", *more, "--adam-eps", "1e-5")
    said, metrics, losses = results(pool, "one", argv, tmp_path / "one")
    found = results(pool, layout, argv, tmp_path / layout)
    assert found[2] == pytest.approx(losses, rel=1e-4)
    assert found[0] == said and found[1] == pytest.approx(metrics, rel=1e-3)
