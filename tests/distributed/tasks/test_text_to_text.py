"""Tasks as text for a GPT and a T5 of Hugging Face, against plain transformers, on any layout.

The references read the files, word the prompts and tokenize on their own.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from fine_tuning_runs import data, run

LENGTH = 40
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "dp2": (2, []),
    "cp2": (2, ["--context-parallel-size", "2"]),
}
FILES = {"QQP": "dev.tsv", "STS-B": "similar.tsv", "RACE": "RACE/dev/middle"}
TRAINING = (
    "--epochs 1 --lr 1e-3 --lr-decay-style constant --weight-decay 0 --hidden-dropout 0 "
    "--attention-dropout 0 --log-interval 1 --num-workers 0 --peak-tflops 1 --seed 1234"
).split()


class GPT2:
    """What continues the prompt after a space; the beginning of what is too long is left out."""

    prompts = {
        "QQP": "Question 1: {0}\nQuestion 2: {1}\nQuestion: Do both questions ask the same thing?"
        "\nAnswer:",
        "STS-B": "Sentence 1: {0}\nSentence 2: {1}\nQuestion: How similar are the sentences, from "
        "0.0 to 5.0?\nAnswer:",
        "RACE": "Article: {0}\n\nQuestion: {1}\nAnswer:",
    }
    words = ("no", "yes")
    flags: tuple[str, ...] = ()

    def __init__(self, folder: Path, texts: list[str]) -> None:
        from tokenizers import ByteLevelBPETokenizer
        from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

        made = ByteLevelBPETokenizer()
        made.train_from_iterator(texts, 340, show_progress=False, special_tokens=["<|endoftext|>"])
        made.save_model(str(folder))
        names = (str(folder / name) for name in ("vocab.json", "merges.txt"))
        self.tokenizer = GPT2TokenizerFast(*names)
        torch.manual_seed(3)
        config = GPT2Config(
            vocab_size=len(self.tokenizer), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4,
            initializer_range=0.1, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def logits(self, prompt: str, answer: str) -> tuple[torch.Tensor, list[int]]:
        """Logits at the tokens of the answer, [n, V], and these tokens."""
        before = self.tokenizer(prompt)["input_ids"]
        ids = self.tokenizer(f"{prompt} {answer}")["input_ids"]
        count = len(ids) - len(before)
        ids = ids[-(LENGTH + 1) :]
        return self.model(torch.tensor([ids[:-1]])).logits[0, -count:], ids[-count:]


class T5:
    """Prompts of the published T5; the decoder answers, and the end of what is too long is left
    out."""

    prompts = {
        "QQP": "qqp question1: {0} question2: {1}",
        "STS-B": "stsb sentence1: {0} sentence2: {1}",
        "RACE": "race question: {1} article: {0}",
    }
    words = ("not_duplicate", "duplicate")
    flags = ("--decoder-start-token", "pad")

    def __init__(self, folder: Path, texts: list[str]) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
        from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<pad>", "</s>", "<unk>"]
        trainer = trainers.UnigramTrainer(
            vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        made.train_from_iterator(texts, trainer)
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        )
        torch.manual_seed(3)
        config = T5Config(
            vocab_size=len(self.tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, n_positions=LENGTH, initializer_factor=1.5,
        )  # fmt: skip
        self.model = T5ForConditionalGeneration(config)

    def logits(self, prompt: str, answer: str) -> tuple[torch.Tensor, list[int]]:
        ids = self.tokenizer(prompt)["input_ids"]
        ids = [*ids[:-1][: LENGTH - 1], 1]
        labels = self.tokenizer(answer)["input_ids"]
        said = self.model(
            input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([[0, *labels[:-1]]])
        )
        return said.logits[0], labels


class Reference:
    """A random model in a folder of Hugging Face, and what it says to the tasks."""

    def __init__(self, kind: type, files: Path, folder: Path) -> None:
        folder.mkdir()
        self.files, self.folder, self.kind = files, folder, kind
        texts = [p for p in kind.prompts.values() for _ in range(20)]
        texts += [" ".join(kind.words), " ".join(f"{n / 5:.1f}" for n in range(26))] * 20
        texts += [line for name in ("dev.tsv", "train.tsv") for line in (files / name).open()]
        self.asked = kind(folder, texts)
        self.asked.model.eval().save_pretrained(folder)
        self.asked.tokenizer.save_pretrained(folder)

    def examples(self, task: str, name: str) -> list[tuple[str, list[str], float]]:
        """Prompt, answers and label of every row."""
        prompt, path = self.kind.prompts[task], self.files / name
        if task == "RACE":
            return [
                (prompt.format(passage["article"], question), options, "ABCD".index(answer))
                for file in sorted(path.iterdir())
                for passage in [json.loads(file.read_text())]
                for question, options, answer in zip(
                    passage["questions"], passage["options"], passage["answers"], strict=True
                )
            ]
        with path.open(newline="") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        if task == "STS-B":
            numbers = [f"{n / 5:.1f}" for n in range(26)]
            return [(prompt.format(row[7], row[8]), numbers, float(row[9])) for row in rows]
        return [(prompt.format(row[3], row[4]), list(self.kind.words), int(row[5])) for row in rows]

    @torch.no_grad()
    def log_probs(self, task: str) -> list[list[float]]:
        """The log-probability of each answer to each prompt."""
        found = []
        for prompt, answers, _ in self.examples(task, FILES[task]):
            found.append([])
            for answer in answers:
                logits, ids = self.asked.logits(prompt, answer)
                chosen = logits.double().log_softmax(-1)[range(len(ids)), ids]
                found[-1].append(float(chosen.sum()))
        return found

    def train(self, task: str, name: str, batch: int, micro: int) -> list[float]:
        """Losses of the steps of one epoch: means over the micro batches, of each of which it is
        the mean over the tokens of the right answers."""
        examples = self.examples(task, name)
        sampler = torch.utils.data.DistributedSampler(examples, num_replicas=1, rank=0, seed=0)
        order = []
        for epoch in range(2):  # the last batch is filled up from the next epoch
            sampler.set_epoch(1234 + epoch)
            order += list(sampler)
        optimizer = torch.optim.AdamW(self.asked.model.parameters(), lr=1e-3, weight_decay=0)
        losses = []
        for first in range(0, len(examples), batch):
            loss = torch.zeros(())
            for start in range(first, first + batch, micro):
                total, tokens = torch.zeros(()), 0
                for number in order[start : start + micro]:
                    prompt, answers, label = examples[number]
                    logits, ids = self.asked.logits(prompt, answers[int(label)])
                    picked = logits.log_softmax(-1)[range(len(ids)), ids]
                    total, tokens = total - picked.sum(), tokens + len(ids)
                loss = loss + total / tokens * micro / batch
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.asked.model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("text-to-text")
    data(folder)
    return folder


def command(reference: Reference, task: str, *more: str) -> list[str]:
    valid = str(reference.files / FILES[task])
    flags = ["--task", task, "--valid-data", valid, "--micro-batch-size", "2"]
    return [*flags, *reference.kind.flags, *more]


def evaluated(pool, reference, task, layout, folder) -> tuple[list[dict], dict[str, float]]:
    """Predictions and metrics without training."""
    size, parallel = LAYOUTS[layout]
    written = folder / f"{layout}.jsonl"
    more = ["--epochs", "0", "--load", str(reference.folder), "--predictions", str(written)]
    found = pool.run(size, run, command(reference, task, *more, *parallel), folder)[0]
    (values,) = found.results["evaluations"][-1]["tasks"].values()
    return [json.loads(line) for line in written.open()], values["metrics"]


@pytest.mark.parametrize(
    "kind, task, layouts",
    [
        pytest.param(GPT2, "QQP", ["one"], id="gpt"),
        pytest.param(T5, "QQP", ["one"], id="t5"),
        *(
            pytest.param(kind, task, list(LAYOUTS), marks=pytest.mark.proof)
            for kind in (GPT2, T5)
            for task in FILES
        ),
    ],
)
def test_evaluation_against_transformers(pool, files, tmp_path, kind, task, layouts):
    reference = Reference(kind, files, tmp_path / "hf")
    wanted = torch.tensor(reference.log_probs(task), dtype=torch.float64)
    labels = [label for *_, label in reference.examples(task, FILES[task])]
    names = {"QQP": ["0", "1"], "RACE": list("ABCD")}
    for layout in layouts:
        rows, metrics = evaluated(pool, reference, task, layout, tmp_path)
        best = wanted.argmax(1).tolist()
        if task == "STS-B":
            assert [row["prediction"] for row in rows] == [number / 5 for number in best]
            assert [row["label"] for row in rows] == labels
            continue
        words = names[task]
        assert [row["prediction"] for row in rows] == [words[number] for number in best]
        assert [row["label"] for row in rows] == [words[label] for label in labels]
        found = [[row["log_probabilities"][word] for word in words] for row in rows]
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), wanted.log_softmax(1), rtol=5e-6, atol=2e-5
        )
        right = sum(number == label for number, label in zip(best, labels, strict=True))
        assert metrics["accuracy"] == right / len(labels)
    assert wanted.log_softmax(1).std(0).max() > 0.05  # the rows differ


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [GPT2, T5])
def test_training_against_transformers(pool, files, tmp_path, kind, layout):
    reference = Reference(kind, files, tmp_path / "hf")
    size, parallel = LAYOUTS[layout]
    train = ["--train-data", str(files / "train.tsv"), "--global-batch-size", "4"]
    load = ["--pretrained-checkpoint", str(reference.folder), *TRAINING]
    load += ["--save", str(tmp_path / "saved")]
    argv = command(reference, "QQP", *train, *load, *parallel)
    found = pool.run(size, run, argv, tmp_path)[0]
    expected = reference.train("QQP", "train.tsv", 4, 2)
    assert found.losses == pytest.approx(expected, rel=2e-5)
    log_probs = torch.tensor(reference.log_probs("QQP"))
    labels = [label for *_, label in reference.examples("QQP", "dev.tsv")]
    right = sum(log_probs.argmax(1) == torch.tensor(labels))
    (values,) = found.results["evaluations"][-1]["tasks"].values()
    assert values["metrics"]["accuracy"] == float(right) / len(labels)
