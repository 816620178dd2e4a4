"""Log-probabilities of answers under a reference model: against transformers and trl, in layouts,
and from the cache."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from training_jobs import train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.source import locate_checkpoint
from megatron.data.index_cache import IndexCache
from megatron.engine.environment import distributed
from megatron.features.preference import reference
from megatron.run.run import parse_run, run_data

WORDS = 60
MODEL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
    "--num-query-groups 2 --swiglu --use-rotary-position-embeddings --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --max-position-embeddings 64 "
    "--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2"
).split()
FLAGS = (
    "--seq-length 24 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 2 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --num-workers 0 --peak-tflops 1 "
    "--log-interval 1000 --split 70,30,0 --eval-iters 1 --eval-interval 2"
).split()


@pytest.fixture(scope="module")
def base(pool, tmp_path_factory) -> str:
    """A Llama of one step."""
    folder = str(tmp_path_factory.mktemp("base"))
    flags = [*FLAGS, *MODEL, "--mock-data", "--train-iters", "1", "--eval-iters", "0"]
    pool.run(1, train, [*flags, "--save", folder])
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> str:
    """A Llama of transformers, whose tokens are numbers."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=WORDS,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("theirs")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    rng = np.random.default_rng(2)

    def text(most: int) -> str:
        return " ".join(map(str, rng.integers(0, WORDS, rng.integers(1, most))))

    records = [
        {"prompt": text(9), "chosen": f" {text(20)}", "rejected": f" {text(12)}"} for _ in range(20)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def found(argv: list[str], forbid: bool = False) -> list[tuple]:
    """For each part of the data what the samples are and what the reference says of them; for the
    pool. With ``forbid`` everything must be in the cache."""
    run = parse_run(None, argv, "gpt")
    build = reference.build_evaluator
    if forbid:
        reference.build_evaluator = None
    try:
        with distributed(run.config.parallel) as mesh:
            data = run_data(run)
            reference.add_reference(run, mesh, data)
            parts = [data.datasets.train, *data.datasets.valid.values()]
            return [
                (
                    [[[*r.context], [*r.continuation]] for n in range(len(p.documents))
                     for r in p.rows(n)],
                    np.array(p.reference),
                    [p[n].reference for n in range(len(p))],
                )
                for p in parts
            ]  # fmt: skip
    finally:
        reference.build_evaluator = build


def by_transformers(folder: str, rows: list) -> np.ndarray:
    """One row at a time, without padding."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    values = []
    for prompt, answer in rows:
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)
        at = log_probs[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])
        values.append(float(at.sum()))
    return np.array(values).reshape(-1, 2)


def flags(base: str, pairs: str, *more: str, loss: str = "dpo") -> list[str]:
    given = ["--preference", loss, "--pretrained-checkpoint", base, "--data-path", pairs]
    return [*FLAGS, "--use-checkpoint-args", *given, *more]


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["1", "tp2-sp", "pp2", "dp2-zero3", "tp2-pp2", "tp2-dp2"])
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_against_transformers(loss: str, layout: str, pool, theirs: str, pairs: str) -> None:
    """Every row of every part, in layouts; the samples have those of their rows."""
    processes, more = 1, []
    if layout != "1":
        parsed = parse_layout(layout)
        processes, more = parsed.processes, flags_for(parsed)
    results = pool.run(processes, found, flags(theirs, pairs, *more, loss=loss))
    for parts in results:
        assert [len(part[1]) for part in parts] == ([14, 6] if loss == "dpo" else [28, 12])
        for rows, log_probs, of_samples in parts:
            np.testing.assert_allclose(log_probs, by_transformers(theirs, rows), rtol=1e-5)
            assert set(of_samples) <= set(map(tuple, log_probs.tolist()))
    for parts in results[1:]:
        for own, first in zip(parts, results[0], strict=True):
            assert np.array_equal(own[1], first[1])


def test_once(pool, base: str, pairs: str, tmp_path: Path) -> None:
    """The second time from the cache, in other layouts too; with other weights, data or lengths
    again."""
    (before,) = pool.run(1, found, flags(base, pairs))
    (again,) = pool.run(1, found, flags(base, pairs, "--lr", "1e-4"), True)
    for own, first in zip(again, before, strict=True):
        assert np.array_equal(own[1], first[1])
    other = str(tmp_path / "other")
    steps = ["--mock-data", "--train-iters", "2", "--eval-iters", "0", "--save", other]
    pool.run(1, train, [*FLAGS, *MODEL, *steps])
    (changed,) = pool.run(1, found, flags(other, pairs))
    assert not np.allclose(changed[0][1], before[0][1], rtol=1e-4)
    named = flags(base, pairs, "--reference-checkpoint", other)
    (also,) = pool.run(1, found, named, True)
    assert np.array_equal(also[0][1], changed[0][1])
    with pytest.raises(Exception, match="NoneType"):
        pool.run(1, found, flags(base, pairs, "--seq-length", "20"), True)


@pytest.mark.proof
def test_weights_of_other_formats_by_their_content(theirs: str, tmp_path: Path) -> None:
    """All bytes count, and the folder's name does not."""
    cache = IndexCache(tmp_path / "cache")

    def digest(folder: Path) -> str:
        located = locate_checkpoint(folder)
        assert located is not None
        return reference.weights_digest(located, cache)

    copied = tmp_path / "copied"
    shutil.copytree(theirs, copied)
    first = digest(Path(theirs))
    assert digest(copied) == first
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"][3] *= 1.5
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert digest(copied) != first == digest(Path(theirs))


@pytest.mark.proof
def test_a_reference_of_its_own_has_all_its_bits(pool, theirs: str, pairs: str) -> None:
    """Where the base of adapters has 4 bits, of the same checkpoint too."""
    own = ["--reference-checkpoint", theirs, "--lora", "--qlora"]
    (parts,) = pool.run(1, found, flags(theirs, pairs, *own))
    for rows, log_probs, _ in parts:
        np.testing.assert_allclose(log_probs, by_transformers(theirs, rows), rtol=1e-5)


def test_without_a_reference(pool, pairs: str, base: str) -> None:
    argv = [*FLAGS, *MODEL, "--preference", "dpo", "--data-path", pairs]
    with pytest.raises(Exception, match="--preference dpo compares .* --reference-checkpoint"):
        pool.run(1, found, argv)
    missing = [*flags(base, pairs), "--reference-checkpoint", "/nowhere"]
    with pytest.raises(Exception, match="--reference-checkpoint /nowhere: no such folder"):
        pool.run(1, found, missing)


def test_training_is_the_same_with_and_without_the_cache(
    pool, base: str, theirs: str, pairs: str, tmp_path: Path
) -> None:
    """Bit for bit: the evaluation before it leaves no trace. Resumed in the middle, too, which
    another reference does not."""
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    (first,) = pool.run(1, train, flags(base, pairs, "--train-iters", "3"))
    assert first.losses[0] == pytest.approx(np.log(2), abs=1e-5) != first.losses[1]
    (half,) = pool.run(1, train, flags(base, pairs, *save, "--train-iters", "3",
                                       "--exit-interval", "2"))  # fmt: skip
    (rest,) = pool.run(1, train, flags(base, pairs, *save, "--train-iters", "3", "--load",
                                       str(tmp_path / "saved")))  # fmt: skip
    assert half.losses + rest.losses == first.losses
    other = [*flags(theirs, pairs, *save), "--load", str(tmp_path / "saved")]
    with pytest.raises(Exception, match=f"the reference model was {base} and is {theirs}"):
        pool.run(1, train, other)
    assert all(np.array_equal(values, rest.state[name]) for name, values in first.state.items())


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["1", "tp2-sp", "pp2", "dp2-zero2"])
@pytest.mark.parametrize("base_is", ["--lora", "--lora --qlora"])
def test_adapters_start_from_the_reference(
    base_is: str, layout: str, pool, base: str, pairs: str
) -> None:
    """The loss of the first step, too where the base has 4 bits: the reference then has the same
    ones."""
    processes, more = 1, base_is.split()
    if layout != "1":
        parsed = parse_layout(layout)
        processes, more = parsed.processes, [*more, *flags_for(parsed)]
    for record in pool.run(processes, train, flags(base, pairs, *more)):
        assert record.losses[0] == pytest.approx(np.log(2), abs=1e-5) != record.losses[1]
