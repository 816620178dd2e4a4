"""Fine-tuning of whole runs: against transformers, in every layout, stopped and continued."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fine_tuning_runs import STEADY, data, flags, run

from megatron.checkpoint.source import open_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "model"))

from bert_pairs import PRE_NORM, BLOCKS, names_in  # noqa: E402

TRAINING = ("--epochs", "2", "--lr", "1e-3", "--lr-warmup-fraction", "0.1", "--weight-decay", "0.1")
WIDE = ("--init-method-std", "0.1", "--no-bias-gelu-fusion")
LENGTH = 24
EPOCHS, PEAK, DECAY, SEED, CLIP = 2, 1e-3, 0.1, 1234, 1.0


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
            losses.append(float(total))
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
    batch = ["--global-batch-size", "4"]
    found = pool.run(size, run, flags(files, *more, *batch, task=task), tmp_path)[0]
    reference = Reference(files, task)
    reference.take_weights(saved / "global_step0")
    expected = reference.train(files / train, 4)
    np.testing.assert_allclose(found.losses, expected, rtol=1e-5)
    metrics = last_metrics(found)
    assert metrics.keys() == valid.keys()
    for name, path in valid.items():
        wanted = reference.evaluate(files / path)
        assert metrics[name] == pytest.approx(wanted, rel=1e-4), name
