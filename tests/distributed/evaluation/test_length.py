"""Tasks of length on models of several layouts: the likelihood of keys after one reading of the
prompt against whole texts, the loss by position against transformers."""

import json
from pathlib import Path

import pytest
import torch
from harness_parts import own_text, quick_report, write_model

pytest.importorskip("lm_eval", reason="the extra evaluate is not installed")

LENGTH = 256
LAYOUTS = {
    "tp2": ["--tensor-model-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "dp2": [],
}


@pytest.fixture(scope="module")
def made(pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("length")
    pool.run(1, make, folder)
    return folder


def make(folder: Path) -> None:
    """For the pool."""
    texts = own_text()
    write_model(folder / "hf", texts, positions=2 * LENGTH)
    documents = [" ".join(texts), "short", " ".join(reversed(texts))]
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "texts.jsonl").write_text("".join(lines))


def evaluated(folder: Path, words: list[str]) -> dict[str, list]:
    """For the pool: answers of the passkey tasks, with one reading of the prompt and with whole
    texts, and losses by position; nothing on other ranks than the first."""
    from megatron.apps.pictures.length import scores_by_length
    from megatron.apps.tasks.harness.command import evaluate, opened_model, parsed
    from megatron.apps.tasks.harness.tasks import load_tasks
    from megatron.apps.tasks.length.tasks import LengthPlan

    tasks = f"passkey,passkey_generate,loss_by_position={folder / 'texts.jsonl'}"
    argv = ["--load", str(folder / "hf"), "--tasks", tasks, "--lengths", str(LENGTH)]
    argv += ["--depths", "0,100", "--limit", "2", "--bootstrap-iters", "0", *words]
    config, settings, processes = parsed(None, argv)
    plan = LengthPlan.of(config.task_names)
    manager, _ = load_tasks([], None, None)
    with quick_report(), opened_model(config, settings, processes, plan.generates) as opened:
        built = plan.built(opened.model, config, config.limit, 0)
        results = evaluate(opened.model, config, manager, built, True)
        opened.model.one_prompt.clear()
        whole = evaluate(opened.model, config, manager, built[:1], True)
    if not results:
        return {}
    both = [
        [[answer for (answer,) in sample["resps"]] for sample in each["samples"]["passkey"]]
        for each in (results, whole)
    ]
    by_length = scores_by_length(results["results"], results["samples"])
    prompts = [sample["doc"] for sample in results["samples"]["passkey"]]
    return {"both": both, "by_length": by_length, "prompts": prompts}


def check(found: dict, folder: Path) -> None:
    one, whole = found["both"]
    for mine, theirs in zip(one, whole, strict=True):
        assert len(mine) == len(theirs) == 100
        for (log_prob, greedy), (expected, expected_greedy) in zip(mine, theirs, strict=True):
            assert log_prob == pytest.approx(expected, rel=1e-4, abs=1e-4)
            assert greedy == expected_greedy
    scores = found["by_length"]["scores"]
    assert scores.keys() == {"passkey", "passkey_generate"}
    assert list(scores["passkey"][str(LENGTH)]) == ["all", "0", "100"]
    right = [float(max(range(100), key=lambda n: row[n][0]) == doc["gold"])
             for row, doc in zip(one, found["prompts"], strict=True)]  # fmt: skip
    assert scores["passkey"][str(LENGTH)]["all"] == sum(right) / 2
    losses = found["by_length"]["loss"]
    for end, expected in expected_losses(folder).items():
        assert losses[end] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def expected_losses(folder: Path) -> dict[str, float]:
    """Those of transformers' model: means of the documents that are long enough."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    lines = (folder / "texts.jsonl").read_text().splitlines()
    windows = [tokenizer.encode(json.loads(line)["text"])[:LENGTH] for line in lines]
    losses = {}
    for begin, end in ((0, 64), (64, 128), (128, 256)):
        values = []
        for window in windows:
            if len(window) == LENGTH:
                ids = torch.tensor([[tokenizer.eos_token_id, *window]])
                log_probs = model(ids).logits[0, :-1].log_softmax(-1)
                chosen = -log_probs.gather(1, ids[0, 1:, None])[:, 0]
                values.append(chosen[begin:end].mean().item())
        losses[str(end)] = sum(values) / len(values)
    return losses


def checked(folder: Path) -> None:
    """For the pool."""
    check(evaluated(folder, []), folder)


def test_answers_after_one_prompt_are_those_of_whole_texts(pool, made):
    pool.run(1, checked, made, timeout=300)


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_same_answers(pool, made, layout):
    (expected,) = pool.run(1, evaluated, made, [], timeout=300)
    found, _ = pool.run(2, evaluated, made, LAYOUTS[layout], timeout=300)
    for mine, theirs in zip(found["both"][0], expected["both"][0], strict=True):
        for (log_prob, _), (wanted, _) in zip(mine, theirs, strict=True):
            assert log_prob == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert found["by_length"]["scores"] == expected["by_length"]["scores"]
