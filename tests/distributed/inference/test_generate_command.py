"""tools/generate.py in several layouts: the texts of one process."""

import json
from pathlib import Path

import pytest
from generation_models import VOCAB, save_theirs

from megatron.tokenizer.plain import NullTokenizer

LAYOUTS = {
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-pp2": (
        *(4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    ),
}
DRAWN = ["--temperature", "0.8", "--top-p", "0.95", "--num-samples", "4"]


def generated(argv: list[str]) -> None:
    """For the pool."""
    from megatron.apps.generation.generation.command import run_generation

    run_generation(None, argv)


@pytest.fixture(scope="module")
def prepared(pool, tmp_path_factory) -> Path:
    """A folder with the model ``hf``, prompts, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("generate")
    save_theirs(folder / "hf", "gpt2")
    NullTokenizer(VOCAB - 1).save_pretrained(folder / "hf")
    (folder / "prompts.txt").write_text("5 7 9\n1\n60 2 2 2 8 9 11 3 3 17\n")
    pool.run(1, generated, flags(folder, "one.jsonl"))
    return folder


def flags(folder: Path, output: str) -> list[str]:
    return [
        *("--load", str(folder / "hf"), "--prompt-file", str(folder / "prompts.txt"), *DRAWN),
        *("--max-new-tokens", "12", "--output", str(folder / output)),
    ]


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_the_texts_of_one_process(layout, pool, prepared):
    processes, parallel = LAYOUTS[layout]
    pool.run(processes, generated, [*flags(prepared, f"{layout}.jsonl"), *parallel], timeout=300)
    one, found = ((prepared / f"{name}.jsonl").read_text() for name in ("one", layout))
    assert found == one
    texts = [json.loads(line)["text"] for line in one.splitlines()]
    assert len(set(texts)) == len(texts) == 12


@pytest.mark.proof
def test_replicas_are_refused(pool, prepared):
    with pytest.raises(Exception, match="generation has no data-parallel replicas"):
        pool.run(2, generated, flags(prepared, "dp2.jsonl"), timeout=300)
