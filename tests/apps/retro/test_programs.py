"""tools/generate.py --retro and tools/retro/evaluate.py, from a corpus to what they print."""

import json
import math
import re
import shutil

import pytest
import upstream_retro as upstream

from megatron.apps.generation.generation.command import run_generation
from megatron.apps.retro.command import run_preprocessing
from megatron.apps.retro.evaluation import run_evaluation
from megatron.apps.tasks.command import run_task
from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer import build_tokenizer

pytest.importorskip("h5py")

LENGTH = 16
MODEL = {
    "num_layers": 3,
    "seq_length": 4 * LENGTH,
    "max_position_embeddings": 6 * LENGTH,
    "retro_gpt_chunk_length": LENGTH,
}
RETRO = {"family": "retro", "retro_add_retriever": True, "retro_cross_attention_layers": (2, 3)}


def preprocess(folder, prefixes, *others):
    run_preprocessing(
        None,
        [
            *("--retro-project-dir", str(folder), "--data-path", "1", prefixes[0], "1"),
            *(prefixes[1], "--split", "80,15,5", "--seq-length", str(4 * LENGTH)),
            *("--train-samples", "16", "--global-batch-size", "4", "--eval-interval", "4"),
            *("--eval-iters", "2", "--tokenizer-type", "ByteLevelTokenizer"),
            *("--bert-embedder-type", "hashing", "--retro-gpt-chunk-length", str(LENGTH), *others),
        ],
    )
    return str(folder)


@pytest.fixture(scope="module")
def corpora():
    return [upstream.corpus("first", 30, 1), upstream.corpus("second", 20, 2)]


@pytest.fixture(scope="module")
def project(corpora, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retro")
    return preprocess(folder / "project", upstream.write_corpora(folder, corpora))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, gpt_config, random_gpt, write_checkpoint):
    """Folders of a Retro and of a GPT, with random weights."""
    folder, tokenizer = (
        tmp_path_factory.mktemp("models"),
        build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer")),
    )
    found = {}
    for name, flags in (("retro", RETRO), ("gpt", {})):
        config = gpt_config(tokenizer.vocab_size, **MODEL | flags)
        write_checkpoint(folder / name, config, random_gpt(config), tokenizer)
        found[name] = str(folder / name)
    return found


BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


def generate(*flags):
    run_generation(None, [*flags, *BYTES, "--greedy", "--kv-cache-gib", "0.01"])


def test_texts_come_with_what_was_read(checkpoints, project, corpora, tmp_path, capfd):
    """A prompt that is the beginning of a document of the database finds it."""
    document = corpora[1].documents[2]
    prompt = bytes(document[: 2 * LENGTH].tolist()).decode()
    retro = ["--load", checkpoints["retro"], "--retro", "--retro-project-dir", project]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{prompt}\nab\n")
    output = tmp_path / "texts.jsonl"
    files = ["--prompt-file", str(prompts), "--output", str(output)]
    generate(*retro, *files, "--max-new-tokens", "20")
    long, short = map(json.loads, output.read_text().splitlines())
    # 32 + 20 tokens: the last one is not read.
    assert {each["name"].split(",")[0] for each in long["neighbors"]} == {
        "chunk 1", "chunk 2", "chunk 3"
    }  # fmt: skip
    assert len(short["neighbors"]) == 2
    for chunk in range(2):
        nearest = long["neighbors"][2 * chunk]
        assert nearest["piece"]["source"].endswith("second")
        assert nearest["piece"]["sequence"] == 2
        assert nearest["piece"]["start"] == chunk * LENGTH
        assert nearest["text"].startswith(prompt[chunk * LENGTH : (chunk + 1) * LENGTH])
    capfd.readouterr()
    generate(*retro, "--prompt", prompt, "--max-new-tokens", "20")
    shown = capfd.readouterr().out
    assert f"{prompt}{long['text']}" in shown
    assert f"second: document 2, tokens {LENGTH} to {2 * LENGTH - 1}" in shown
    generate("--load", checkpoints["retro"], *files, "--max-new-tokens", "20")
    assert "without --retro the model's attention to retrieved text is left out" in (
        capfd.readouterr().out
    )
    alone = json.loads(output.read_text().splitlines()[0])
    assert "neighbors" not in alone
    assert alone["text"] != long["text"]


@pytest.fixture(scope="module")
def evaluated(checkpoints, project, tmp_path_factory):
    """Evaluates a model; the results and the file."""
    folder = tmp_path_factory.mktemp("results")

    def evaluate(name, *flags, project=project):
        file = folder / f"{len(list(folder.iterdir()))}.json"
        argv = ["--load", checkpoints[name], "--retro-project-dir", project, *BYTES, *flags]
        run_evaluation(None, [*argv, "--output", str(file)])
        return json.loads(file.read_text())["evaluations"][0]["tasks"], file

    return evaluate


def test_perplexity_with_and_without_neighbours(evaluated, tmp_path, capfd):
    gpt, file = evaluated("gpt")
    assert list(gpt) == ["no retrieval"]
    figure = tmp_path / "figures" / "leakage.png"
    found, _ = evaluated("retro", "--compare", f"GPT={file}", "--figure", str(figure))
    assert list(found) == ["neighbours own", "neighbours none", "neighbours shuffled"]
    assert figure.read_bytes()[:4] == b"\x89PNG"
    for numbers in found.values():
        assert numbers["examples"] == 16
        assert numbers["tokens"] == 16 * 4 * LENGTH
        metrics = numbers["metrics"]
        # A byte of text is a token; the end of a document is none.
        assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2), rel=0.05)
        assert metrics["bits_per_byte"] > metrics["loss"] / math.log(2)
        datasets = numbers["datasets"].values()
        assert sum(each["tokens"] for each in datasets) == numbers["tokens"]
        assert numbers["filtered"]["chunks"][-1] == 16 * 4
        assert sum(numbers["by_overlap"]["chunks"]) == 16 * 4
    assert len({numbers["metrics"]["loss"] for numbers in found.values()}) == 3
    shown = capfd.readouterr().out
    assert re.search("share +chunks +GPT +neighbours own +neighbours none", shown)
    few, _ = evaluated("retro", "--samples", "3", "--neighbors", "own", "--part", "train")
    assert few["neighbours own"]["examples"] == 3
    with pytest.raises(ConfigError, match="--compare GPT: its chunks are not those"):
        evaluated("retro", "--samples", "3", "--compare", f"GPT={file}")


@pytest.mark.parametrize(
    ("model", "flags", "told"),
    [
        ("gpt", ["--neighbors", "own"], "--neighbors own: the model is a gpt, which reads no"),
        ("retro", ["--neighbors", "own,some"], "--neighbors own,some: expected some of own, none"),
        ("retro", ["--compare", "a=b.json"], "b.json is not a file of tools/retro/evaluate.py"),
        ("retro", ["--compare", "a"], "--compare a: expected NAME=FILE"),
        ("retro", ["--load", "nowhere"], "nowhere"),
    ],
)
def test_flags_that_cannot_be_used(model, flags, told, evaluated):
    with pytest.raises((ConfigError, CheckpointError), match=told):
        evaluated(model, *flags)


def test_projects_of_other_models(checkpoints, evaluated, corpora, tmp_path):
    """Another chunk length, another tokenizer, no stages."""
    prefixes = upstream.write_corpora(tmp_path, corpora)
    other = preprocess(
        tmp_path / "p", prefixes, "--retro-gpt-chunk-length", "8", "--retro-tasks", "db-build"
    )
    with pytest.raises(ConfigError, match="chunks of 16 tokens, and those of .* have 8"):
        evaluated("retro", project=other)
    prompt = ["--retro", "--prompt", "a"]
    with pytest.raises(ConfigError, match="chunks of 16 tokens, and those of .* have 8"):
        generate("--load", checkpoints["retro"], *prompt, "--retro-project-dir", other)
    with pytest.raises(ConfigError, match="a model of the family gpt reads no retrieved text"):
        generate("--load", checkpoints["gpt"], *prompt, "--retro-project-dir", other)
    with pytest.raises(ConfigError, match="--retro needs --retro-project-dir"):
        generate("--load", checkpoints["retro"], *prompt)
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    changed = {"retro_gpt_tokenizer_type": "NullTokenizer", "retro_gpt_vocab_size": 300}
    (tmp_path / "p" / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigError, match="vocabulary of 259 tokens, and the tokenizer of"):
        evaluated("retro", project=other)


def test_a_tokenizer_of_the_same_size_is_another(evaluated, project, tmp_path):
    folder = shutil.copytree(project, tmp_path / "p")
    config = json.loads((folder / "config.json").read_text())
    changed = {"retro_gpt_tokenizer_type": "NullTokenizer", "retro_gpt_vocab_size": 258}
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ConfigError, match="config.json splits text otherwise than the model's"):
        evaluated("retro", project=str(folder))


def test_a_missing_index_is_told_before_text_is_generated(checkpoints, project, tmp_path):
    """Although the prompt has no chunk."""
    folder = shutil.copytree(project, tmp_path / "p")
    shutil.rmtree(folder / "index")
    retro = ["--load", checkpoints["retro"], "--retro", "--retro-project-dir", str(folder)]
    with pytest.raises(ValueError, match="--retro-tasks index-"):
        generate(*retro, "--prompt", "a", "--max-new-tokens", "2")


def test_tasks_score_a_retro_without_neighbours(checkpoints, tmp_path, capfd):
    """The perplexity of a text by tasks/main.py, and what it says of it."""
    text = tmp_path / "wiki.txt"
    text.write_text("some words of a text " * 12)
    argv = ["--task", "WIKITEXT103", "--valid-data", str(text), *BYTES]
    run_task(None, ["--load", checkpoints["retro"], *argv])
    told = capfd.readouterr().out
    assert "--task WIKITEXT103: a Retro reads these texts without neighbours" in told
    assert "validation results on WIKITEXT103" in told
