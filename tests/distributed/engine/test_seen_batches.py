"""tools/show_batch.py prints what the ranks of a run really get."""

import json
from importlib import import_module

import numpy as np
import pytest
from family_models import FAMILIES, NO_DROPOUT, blocks
from training_jobs import TINY, train

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from tools.show_batch import main

STEPS = 4
EOD = 99


MODULES = {
    "gpt": "megatron.families.gpt",
    "bert": "megatron.features.masked.bert",
    "t5": "megatron.features.masked.t5",
    "retro": "megatron.features.retro.family",
}


def tokens_used(argv, family="gpt", field="tokens_BS"):
    """The tokens of every micro batch that the model saw; for the pool."""
    module, tokens = import_module(MODULES[family]), []
    begin = module.begin

    def noted(*args):
        tokens.append(getattr(args[-1], field).tolist())
        return begin(*args)

    module.begin = noted
    try:
        train(argv)
    finally:
        module.begin = begin
    return tokens


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(3)
    for name in "ab":
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            for _ in range(30):
                writer.add_document([[*rng.integers(0, EOD, rng.integers(4, 30)), EOD]])
    return ["2", str(folder / "a"), "1", str(folder / "b")]


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (1, "--micro-batch-size 2"),
        (2, "--micro-batch-size 1"),
        (4, "--micro-batch-size 2 --tensor-model-parallel-size 2 --rampup-batch-size 4 4 8"),
    ],
)
def test_what_is_shown_is_what_the_model_gets(pool, data, capsys, processes, layout):
    mocked = TINY.index("--mock-data")
    flags = [
        *TINY[:mocked],
        *TINY[mocked + 1 :],
        *f"--global-batch-size 8 --train-iters {STEPS} --eod-mask-loss {layout}".split(),
        *["--skip-samples", "5:9", "--data-path", *data],
    ]
    used = pool.run(processes, tokens_used, flags)
    for rank in range(processes):
        shown = []
        for iteration in range(1, STEPS + 1):
            which = f"--iteration {iteration} --world-size {processes} --rank {rank} --json"
            main([*which.split(), *flags])
            shown += [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [s["tokens"] for s in shown] == [s for batch in used[rank] for s in batch]
    assert all(s["loss_mask"] == [float(t != EOD) for t in s["tokens"]] for s in shown)
    for sample in shown:
        assert sum(p["stop"] - p["start"] for p in sample["pieces"]) == len(sample["tokens"]) + 1
        assert {p["source"] for p in sample["pieces"]} <= set(data)


@pytest.mark.parametrize(
    ("family", "field"),
    [("bert", "tokens_BS"), ("t5", "decoder_tokens_BD"), ("retro", "tokens_BS")],
)
def test_other_families(pool, capsys, family, field):
    flags = [*FAMILIES[family], *f"--global-batch-size 8 --train-iters {STEPS}".split()]
    flags += [*blocks(family, 2), *NO_DROPOUT]
    used = pool.run(2, tokens_used, flags, family, field)
    for rank in range(2):
        shown = []
        for iteration in range(1, STEPS + 1):
            which = f"--iteration {iteration} --world-size 2 --rank {rank} --json"
            main([*which.split(), *flags])
            shown += [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [s["tokens"] for s in shown] == [s for batch in used[rank] for s in batch]


def test_text_for_people(data, capsys):
    flags = [f for f in TINY if f != "--mock-data"] + ["--train-iters", "4", "--data-path", *data]
    main([*flags, "--iteration", "2", "--eod-mask-loss", "--reset-attention-mask"])
    text = capsys.readouterr().out
    assert "iteration 2 of 4: samples 4 to 7, 16 tokens each" in text
    assert "rank 0: micro batch 4 of 4\n  sample 7, loss on " in text
    assert f"{data[1]}: document " in text
    # The first token behind an end of document stands on a line of its own, and is not asked for.
    first = [line for line in text.splitlines() if line.startswith("    | [[")]
    assert first and all(line.split("[[")[1].split("]]")[0].isdecimal() for line in first)
    assert "<eod>" in text and "[[<eod>]]" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--iteration 5", "--iteration 5: the run has steps 1 to 4"),
        ("--iteration 0", "--iteration and --world-size start at 1"),
        ("--rank 1", "--rank 1 must be below --world-size 1"),
        ("--world-size 3", "global-batch-size"),
    ],
)
def test_steps_that_cannot_be_shown(flags, message):
    with pytest.raises(SystemExit, match=message):
        main([*TINY, "--train-iters", "4", *flags.split()])


def test_samples_skipped_from_a_checkpoint_on(pool, data, tmp_path, capsys):
    folder = str(tmp_path / "checkpoints")
    flags = [f for f in TINY if f != "--mock-data"] + ["--data-path", *data, "--save", folder]
    pool.run(1, train, [*flags, "--train-iters", "4", "--exit-interval", "2"])
    flags += ["--train-iters", "4", "--load", folder]
    with pytest.raises(Exception, match="--skip-samples 2:4: the checkpoint's run has consumed"):
        pool.run(1, train, [*flags, "--skip-samples", "2:4"])
    (used,) = pool.run(1, tokens_used, [*flags, "--skip-samples", "10:13"])
    for iteration in (3, 4):
        main([*flags, "--iteration", str(iteration), "--skip-samples", "10:13", "--json"])
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [s["tokens"] for s in shown] == [s for batch in used for s in batch]
    main([*flags, "--iteration", "3", "--json"])
    unskipped = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert [s["tokens"] for s in shown[:2]] == unskipped[:2] != unskipped[2:]
    assert shown[2]["tokens"] != unskipped[2]
