"""Fine-tuning of whole runs: against transformers, in every layout, stopped and continued."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from bert_pairs import BLOCKS, PRE_NORM, names_in
from fine_tuning_runs import STEADY, data, flags, run

from megatron.checkpoint.source import open_checkpoint

TRAINING = ("--epochs", "4", "--lr", "1e-3", "--lr-warmup-fraction", "0.1", "--weight-decay", "0.1")
WIDE = ("--init-method-std", "0.1", "--no-bias-gelu-fusion")
LENGTH = 24
EPOCHS, PEAK, DECAY, SEED, CLIP = 4, 1e-3, 0.1, 1234, 1.0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fine-tuning")
    data(folder)
    return folder


class Reference:
    """The same fine-tuning in plain torch and transformers, one example at a time, from the files:
    reads, tokenizes, trains and evaluates with none of this project's code."""

    def __init__(self, files: Path, task: str) -> None:
        transformers = pytest.importorskip("transformers")
        vocab = (files / "vocab.txt").read_text().split()
        self.ids = {word: number for number, word in enumerate(vocab)}
        self.task = task
        kind = "MultipleChoice" if task == "RACE" else "SequenceClassification"
        config = transformers.MegatronBertConfig(
            vocab_size=45, hidden_size=32, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=LENGTH, layer_norm_eps=1e-5,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_act="gelu",
            num_labels=1 if task == "STS-B" else 2,
        )  # fmt: skip
        self.model = getattr(transformers, f"MegatronBertFor{kind}")(config).train()

    def take_weights(self, folder: Path, layers: int = 2) -> None:
        """Those of our checkpoint."""
        source, theirs = open_checkpoint(folder), dict(self.model.named_parameters())
        seen = set()
        for name in source.names():
            weights = [theirs[other] for other in names_in(PRE_NORM + BLOCKS, name)]
            whole = source.tensor(name).split([len(weight) for weight in weights])
            for weight, part in zip(weights, whole, strict=True):
                weight.data.copy_(part)
            seen.update(names_in(PRE_NORM + BLOCKS, name))
        assert seen == theirs.keys()

    def examples(self, path: Path) -> list[tuple[list[tuple[str, str]], float]]:
        """Pairs of texts, one for each choice, and the label."""
        if self.task == "RACE":
            found = []
            for file in sorted(path.iterdir(), key=lambda file: file.name):
                passage = json.loads(file.read_text())
                for text, options, answer in zip(
                    passage["questions"], passage["options"], passage["answers"], strict=True
                ):
                    asked = [
                        text.replace("_", option) if "_" in text else f"{text} {option}"
                        for option in options
                    ]
                    pairs = [(words, passage["article"]) for words in asked]
                    found.append((pairs, "ABCD".index(answer)))
            return found
        with path.open(newline="") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        if self.task == "STS-B":
            return [([(row[7], row[8])], float(row[9])) for row in rows]
        return [([(row[3], row[4])], int(row[5])) for row in rows]

    def inputs(self, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        rows = []
        for first, second in pairs:
            a, b = ([self.ids[word] for word in text.split()] for text in (first, second))
            tokens = [self.ids["[CLS]"], *a, self.ids["[SEP]"], *b]
            types = [0] * (len(a) + 2) + [1] * len(b)
            tokens, types = tokens[: LENGTH - 1], types[: LENGTH - 1]
            tokens, types = [*tokens, self.ids["[SEP]"]], [*types, 1]
            rest = LENGTH - len(tokens)
            rows.append((tokens + [0] * rest, types + [0] * rest, [1] * len(tokens) + [0] * rest))
        names = ("input_ids", "token_type_ids", "attention_mask")
        found = {n: torch.tensor(v) for n, v in zip(names, zip(*rows, strict=True), strict=True)}
        return {n: v[None] for n, v in found.items()} if self.task == "RACE" else found

    def loss(self, example) -> torch.Tensor:
        pairs, label = example
        made = torch.float32 if self.task == "STS-B" else torch.int64
        return self.model(**self.inputs(pairs), labels=torch.tensor([label], dtype=made)).loss

    def train(self, path: Path, batch: int) -> list[float]:
        """The losses of all steps."""
        examples = self.examples(path)
        count = EPOCHS * len(examples)
        warm = int(0.1 * count)
        order = []
        for epoch in range(EPOCHS + 1):
            sampler = torch.utils.data.DistributedSampler(examples, num_replicas=1, rank=0, seed=0)
            sampler.set_epoch(SEED + epoch)
            order += list(sampler)
        parts = [[p for p in self.model.parameters() if (p.dim() > 1) == wide] for wide in (1, 0)]
        optimizer = torch.optim.AdamW(
            [{"params": parts[0], "weight_decay": DECAY}, {"params": parts[1], "weight_decay": 0}],
        )
        losses = []
        for step in range(math.ceil(count / batch)):
            done = step * batch
            rate = done / warm if done <= warm else 1 - (done - warm) / (count - warm)
            for group in optimizer.param_groups:
                group["lr"] = PEAK * rate
            total = sum(self.loss(examples[n]) for n in order[done : done + batch]) / batch
            optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            optimizer.step()
            losses.append(float(total.detach()))
        return losses

    @torch.no_grad()
    def evaluate(self, path: Path) -> dict[str, float]:
        from scipy import stats

        examples = self.examples(path)
        logits = [self.model(**self.inputs(pairs)).logits[0] for pairs, _ in examples]
        labels = [label for _, label in examples]
        loss = float(np.mean([float(self.loss(example)) for example in examples]))
        if self.task == "STS-B":
            numbers = [float(each) for each in logits]
            linear, ranked = stats.pearsonr(numbers, labels)[0], stats.spearmanr(numbers, labels)[0]
            mean = (linear + ranked) / 2
            return {"correlation": mean, "pearson": linear, "spearman": ranked, "loss": loss}
        right = [int(each.argmax()) == label for each, label in zip(logits, labels, strict=True)]
        return {"accuracy": sum(right) / len(right), "loss": loss}


SETS = {
    "QQP": ("train.tsv", {"dev": "dev.tsv", "dev-other": "dev_other.tsv"}),
    "STS-B": ("similar.tsv", {"similar": "similar.tsv"}),
    "RACE": ("RACE/train/middle", {"dev-middle": "RACE/dev/middle"}),
}


def last_metrics(found) -> dict[str, dict[str, float]]:
    tasks = found.results["evaluations"][-1]["tasks"]
    return {name: values["metrics"] for name, values in tasks.items()}


@pytest.mark.proof
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("task", SETS)
def test_against_transformers(task, size, pool, files, tmp_path):
    pytest.importorskip("scipy", reason="needs scipy")
    train, valid = SETS[task]
    saved = tmp_path / "saved"
    more = [*TRAINING, *WIDE, *STEADY, "--save", str(saved), "--save-init"]
    batch = ["--micro-batch-size", "1", "--global-batch-size", "2"]
    found = pool.run(size, run, flags(files, *more, *batch, task=task), tmp_path)[0]
    reference = Reference(files, task)
    reference.take_weights(saved / "global_step0")
    expected = reference.train(files / train, 2)
    assert len(expected) > 30
    # A difference of rounding doubles within nine steps.
    allowed = 3e-6 * 2 ** (np.arange(len(expected)) / 9)
    off = np.abs(np.divide(found.losses, expected) - 1)
    assert (off < allowed).all(), off / allowed
    metrics = last_metrics(found)
    assert metrics.keys() == valid.keys()
    for name, path in valid.items():
        wanted = reference.evaluate(files / path)
        assert metrics[name] == pytest.approx(wanted, rel=1e-4), name


ONE = ("--epochs", "1", "--lr", "1e-3", "--lr-warmup-fraction", "0.1")


def saved_run(pool, files, folder, size, *more, task="QQP"):
    """The first rank's run, with checkpoints in ``folder``."""
    given = [*more, "--save", str(folder / "saved"), "--load", str(folder / "saved")]
    return pool.run(size, run, flags(files, *given, task=task), folder)[0]


def test_epochs_of_two_ranks_and_an_evaluation(pool, files, tmp_path):
    """Lines, results and files of a fine-tuning, and of its evaluation by another layout."""
    trained = saved_run(
        pool, files, tmp_path, 2, *ONE, *WIDE, "--keep-last", "--predictions",
        str(tmp_path / "best.jsonl"),
    )  # fmt: skip
    assert len(trained.losses) == 5  # 19 samples, 4 a step: the last batch is kept
    sets = [("dev", 11), ("dev-other", 5)]
    for name, total in sets:
        line = next(line for line in trained.printed.splitlines() if f"for {name}:" in line)
        assert f"> |epoch: 0| metrics for {name}: correct / total = " in line
        assert f" / {total} = " in line
    (overall,) = (line for line in trained.printed.splitlines() if "overall:" in line)
    correct = int(overall.split("correct / total = ")[1].split()[0])
    assert f">> |epoch: 0| overall: correct / total = {correct} / 16 = " in overall
    assert "--keep-last without a number changes nothing" in trained.printed
    best = json.loads((tmp_path / "saved" / "best_epoch.json").read_text())
    assert (best["epoch"], best["checkpoint"], best["value"]) == (0, "global_step5", correct / 16)

    argv = flags(files, "--epochs", "0", *WIDE, "--load", str(tmp_path / "saved"))
    argv.insert(argv.index("--valid-data") + 1, str(files / "test.tsv"))
    found = pool.run(1, run, argv, tmp_path, "evaluated")[0]
    assert f">> |epoch: -1| overall: correct / total = {correct} / 16 = " in found.printed
    assert "3 predictions for test, whose labels are not known" in found.printed
    metrics, before = last_metrics(found), last_metrics(trained)
    assert metrics.pop("test") == {}
    assert metrics == {name: pytest.approx(values, rel=1e-5) for name, values in before.items()}
    rows = [
        json.loads(line)
        for line in (tmp_path / "saved" / "predictions_test_dev_dev-other.jsonl").open()
    ]
    assert [row["set"] for row in rows] == ["test"] * 3 + ["dev"] * 11 + ["dev-other"] * 5
    assert [row["id"] for row in rows[:3]] == ["0", "1", "2"]
    assert sum(row["prediction"] == row["label"] for row in rows[3:]) == correct
    of_best = [json.loads(line) for line in (tmp_path / "best.jsonl").open()]
    assert [(row["set"], row["id"], row["prediction"]) for row in of_best] == [
        (row["set"], row["id"], row["prediction"]) for row in rows[3:]
    ]


LAYOUTS = {
    "dp2": (2, []),
    "dp3": (3, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-dp2": (4, ["--tensor-model-parallel-size", "2"]),
    "pp2-dp2-zero1": (4, ["--pipeline-model-parallel-size", "2", "--zero-stage", "1"]),
    "dp2-zero3": (2, ["--zero-stage", "3"]),
    "cp2-dp2": (4, ["--context-parallel-size", "2"]),
}


@pytest.mark.proof
@pytest.mark.parametrize("task", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, task, pool, files, tmp_path):
    """The same steps, and the same metrics after them, as one process; dropout aside."""
    size, more = LAYOUTS[layout]
    micro = ["--micro-batch-size", "1", "--global-batch-size", "6"]
    given = [*ONE, *WIDE, *STEADY, *micro]
    (tmp_path / "one").mkdir()
    wanted = pool.run(1, run, flags(files, *given, task=task), tmp_path / "one")[0]
    found = pool.run(size, run, flags(files, *given, *more, task=task), tmp_path)[0]
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=2e-5)
    metrics, expected = last_metrics(found), last_metrics(wanted)
    for name, values in expected.items():
        assert metrics[name] == pytest.approx(values, rel=1e-4), name
        assert metrics[name].get("accuracy") == values.get("accuracy")


@pytest.mark.proof
@pytest.mark.parametrize("task, stop", [("QQP", 7), ("RACE", 3)])
def test_stopped_in_an_epoch_and_continued(task, stop, pool, files, tmp_path):
    """With dropout: bit for bit the same; to rounding in another layout, without."""
    epochs = ["--epochs", "3", *ONE[2:], *WIDE]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    expected = saved_run(pool, files, whole, 2, *epochs, task=task)
    first = saved_run(pool, files, parts, 2, *epochs, "--exit-interval", str(stop), task=task)
    assert "stopped by" in first.printed and len(first.losses) == stop
    second = saved_run(pool, files, parts, 2, *epochs, task=task)
    assert second.losses == expected.losses  # the file keeps the first rows
    assert last_metrics(second) == last_metrics(expected)
    last = f"global_step{len(expected.losses)}"
    ours, theirs = (open_checkpoint(folder / "saved" / last) for folder in (parts, whole))
    for name in theirs.names():
        assert torch.equal(ours.tensor(name), theirs.tensor(name)), name
    records = [json.loads((f / "saved" / "best_epoch.json").read_text()) for f in (parts, whole)]
    assert records[0] == records[1] and len(records[0]["epochs"]) == 3


@pytest.mark.proof
def test_continued_in_another_layout(pool, files, tmp_path):
    epochs = ["--epochs", "3", *ONE[2:], *WIDE, *STEADY, "--global-batch-size", "4"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    expected = saved_run(pool, files, whole, 1, *epochs)
    saved_run(pool, files, parts, 2, *epochs, "--exit-interval", "7")
    tp = ["--tensor-model-parallel-size", "2"]
    second = saved_run(pool, files, parts, 2, *epochs, *tp)
    np.testing.assert_allclose(second.losses, expected.losses, rtol=2e-5)


@pytest.mark.proof
def test_an_epoch_whose_evaluation_was_killed(pool, files, tmp_path):
    """The checkpoint of an epoch without a record of it: evaluated when it is loaded."""
    saved_run(pool, files, tmp_path, 1, *ONE)
    best = tmp_path / "saved" / "best_epoch.json"
    content = json.loads(best.read_text())
    best.unlink()
    again = saved_run(pool, files, tmp_path, 1, *ONE)
    assert "|epoch: 0| overall" in again.printed
    assert json.loads(best.read_text()) == content


@pytest.mark.proof
def test_the_best_epoch_survives_retention(pool, files, tmp_path):
    given = ["--epochs", "4", "--lr", "3e-3", "--keep-last", "1"]
    found = saved_run(pool, files, tmp_path, 1, *given)
    best = json.loads((tmp_path / "saved" / "best_epoch.json").read_text())
    kept = {path.name for path in (tmp_path / "saved").glob("global_step*")}
    assert kept == {best["checkpoint"], f"global_step{len(found.losses)}"}


@pytest.mark.proof
@pytest.mark.realdata
@pytest.mark.parametrize("task", ["QQP", "MNLI"])
def test_few_rows_are_learned(task, pool, realdata, tmp_path):
    """Training accuracy reaches 1.0 on the k-shot files of GLUE."""
    (train,) = sorted((realdata / "glue" / "kshot").glob(f"*{task}*train.tsv"))
    vocab = realdata / "bert_wordpiece" / "bert-base-uncased-vocab.txt"
    argv = (
        f"--task {task} --train-data {train} --valid-data {train} --vocab-file {vocab} "
        "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --tokenizer-type BertWordPieceLowerCase --num-workers 0 "
        "--micro-batch-size 8 --epochs 12 --lr 1e-3 --lr-warmup-fraction 0.1 --peak-tflops 1 "
        "--init-method-std 0.1 --hidden-dropout 0 --attention-dropout 0 --log-interval 1"
    )
    found = pool.run(1, run, argv.split(), tmp_path)[0]
    (metrics,) = last_metrics(found).values()
    assert metrics["accuracy"] == 1.0
