"""A model that lm-eval's own hf model can read too, tasks of every kind in local files, and what
lm-eval says of them by either."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[2]
POSITIONS = 64
KINDS = {
    "words": """output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "letters": """output_type: multiple_choice
doc_to_text: "{{context}}\\n{{choices | join('\\n')}}\\nAnswer:"
doc_to_choice: [A, B, C, D]
doc_to_target: gold
fewshot_split: test
num_fewshot: 1
metric_list: [{metric: acc}]
""",
    "cloze": """output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "pages": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "written": """output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["you", "ar", " i"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
""",
}  # fmt: skip
"""The body of each task's file."""


def write_model(folder: Path, texts: list[str], positions: int = POSITIONS) -> None:
    """A random GPT-2 with a small vocabulary, in Hugging Face's form."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 400, special_tokens=["<|endoftext|>"], show_progress=False)
    folder.mkdir()
    bpe.save_model(str(folder))
    files = folder / "vocab.json", folder / "merges.txt"
    tokenizer = GPT2BPETokenizer.from_files(*files)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=tokenizer.vocab_size,
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_positions=positions,
        initializer_range=0.3,
        bos_token_id=tokenizer.eod,
        eos_token_id=tokenizer.eod,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    # One of many tokens soon ends what such a model writes.
    ends = [tokenizer.eod, *range(270, min(340, tokenizer.vocab_size))]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def own_text() -> list[str]:
    """Paragraphs of this project's documentation."""
    pages = [(ROOT / "docs" / "guides" / name).read_text() for name in ("data.md", "parity.md")]
    found = [part.replace("\n", " ") for page in pages for part in page.split("\n\n")]
    return [part for part in found if re.match(r"[A-Z]", part) and len(part) > 80]


def write_tasks(folder: Path, texts: list[str], model: Path, documents: int) -> None:
    """Questions and gaps in the texts; long ones, spaces at the end of a context, empty contexts,
    answers that the model itself would give."""
    folder.mkdir()
    draw = random.Random(3)
    words = " ".join(texts).split()
    questions, gaps = [], []
    for number in range(documents):
        start = draw.randrange(len(words) - 130)
        context = " ".join(words[start : start + draw.choice((3, 8, 20, 60, 120))])
        choices = [" ".join(draw.sample(words, draw.choice((1, 2, 3)))) for _ in range(4)]
        questions.append({"context": context, "choices": choices, "gold": number % 4})
        context += draw.choice(("", " ", "  "))
        gaps.append({"context": context, "target": " " + " ".join(draw.sample(words, 2))})
    gaps += [{"context": gap["context"].rstrip(), "target": ""} for gap in gaps[:4]]
    contexts = [gap["context"] for gap in gaps[-4:]]
    for gap, target in zip(gaps[-4:], greedy(model, contexts), strict=True):
        gap["target"] = target
    gaps += [{"context": "", "target": " ".join(words[:3])}, gaps[0]]
    pages = [{"page": page} for page in (" ".join(words[:300]), *texts[:3], "One.")]
    rows = {"words": questions, "letters": questions, "cloze": gaps, "pages": pages}
    rows["written"] = [row for row in gaps if row["context"]]
    for name, body in KINDS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n{body}"
        )


@torch.no_grad()
def greedy(model: Path, contexts: list[str]) -> Iterator[str]:
    """The text of the model's most probable token after each, which is one token of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    for context in contexts:
        ids = tokenizer.encode(context)
        best = network(torch.tensor([ids[-POSITIONS:]])).logits[0, -1].argsort(descending=True)
        yield next(
            text
            for text in (tokenizer.decode([token]) for token in best.tolist())
            if tokenizer.encode(context + text)[:-1] == ids
        )


@contextmanager
def alone() -> Iterator[None]:
    """Hide the layout from lm-eval's own model, which would wait for the other ranks."""
    with patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        yield


@contextmanager
def quick_report() -> Iterator[None]:
    """lm-eval without its report of the environment, for which it starts programs."""
    from lm_eval import evaluator

    kept, evaluator.add_env_info = evaluator.add_env_info, lambda storage: None
    try:
        yield
    finally:
        evaluator.add_env_info = kept


def ours(argv: list[str]) -> dict[str, Any]:
    """lm-eval's results of a command line, on every rank."""
    from megatron.apps.tasks.harness.command import evaluate, opened_model, parsed
    from megatron.apps.tasks.harness.tasks import generate, load_tasks

    config, settings, processes = parsed(None, argv)
    names, flag = config.task_names, config.tasks_flag
    manager, tasks = load_tasks(names, config.include_path, None, flag)
    with quick_report(), opened_model(config, settings, processes, generate(tasks)) as opened:
        return evaluate(opened.model, config, manager, tasks)


def theirs(
    model: Path, tasks: Path, batch_size: int, names: Sequence[str] = tuple(KINDS)
) -> dict[str, Any]:
    """Those of lm-eval's own model of a Hugging Face folder."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with alone():
        lm = HFLM(str(model), device="cpu", dtype="float32", batch_size=batch_size)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    with quick_report():
        return simple_evaluate(lm, tasks=list(names), task_manager=manager, bootstrap_iters=0)


def check_equal(own: dict[str, Any], other: dict[str, Any]) -> int:
    """That every request has one answer; returns how many of them the model would give itself."""
    most_probable = 0
    assert own["samples"].keys() == other["samples"].keys()
    for task, samples in other["samples"].items():
        assert len(own["samples"][task]) == len(samples)
        for mine, sample in zip(own["samples"][task], samples, strict=True):
            assert mine["arguments"] == sample["arguments"]
            for a, b in zip(mine["resps"], sample["resps"], strict=True):
                if isinstance(b[0], str):
                    assert a == b, (task, a, b)
                    continue
                (log_prob, flag), (wanted, wanted_flag) = pair(a[0]), pair(b[0])
                assert abs(log_prob - wanted) <= 1e-5 * max(1, abs(wanted)), (task, a, b)
                assert flag == wanted_flag, (task, a, b)
                most_probable += bool(flag)
    for task, metrics in other["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                found = own["results"][task][name]
                assert abs(found - value) <= 1e-5 * max(1, abs(value)), (task, name)
            else:
                assert own["results"][task][name] == value, (task, name)
    return most_probable


def pair(answer: Any) -> tuple[float, Any]:
    return answer if isinstance(answer, tuple) else (answer, None)
