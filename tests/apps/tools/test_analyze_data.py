"""tools/analyze_data.py: the samples of a run's flags, and mistakes."""

import json

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.features.curriculum.metric_files import read_rows
from megatron.run.run import parse_run, run_data
from tools import analyze_data

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --lr 1 "
    "--micro-batch-size 2 --train-iters 5 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 50 --eval-iters 0"
).split()


def test_two_metrics_of_a_run(tmp_path, capsys):
    save = ["--save", str(tmp_path), "--analyzing-num-threads", "2"]
    analyze_data.main(["--analyzing-metric", "seqlen", "vocab_rarity", *FLAGS, *save])
    out = capsys.readouterr().out
    assert "seqlen: 10 samples, 1 values (0% 16, " in out and "vocab_rarity: 10 samples" in out
    values = read_rows(str(tmp_path / "vocab_rarity/vocab_rarity_sample_to_metric")).values
    assert len(values) == len(run_data(parse_run(None, FLAGS))[0].train) == 10
    # The token embedding has 128 rows.
    counts = read_rows(str(tmp_path / "total_vocab_freq/total_vocab_freq_metric_value")).values
    assert len(counts) == 129 and counts.sum() == 10 * 17


def test_a_curriculum_in_the_flags_changes_nothing(tmp_path):
    """Its files need not be there yet."""
    metric = {
        "index_to_sample_path": str(tmp_path / "not-yet"),
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 25,
        "max_difficulty": 100,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 1},
    }
    learning = {"enabled": True, "curriculum_metrics": {"vocab_rarity": metric}}
    sampling = {"enabled": True, "curriculum_learning": learning}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"data_efficiency": {"enabled": True, "data_sampling": sampling}}))
    for name, more in (("plain", []), ("drawn", ["--deepspeed_config", str(path)])):
        analyze_data.main([*FLAGS, "--save", str(tmp_path / name), *more])
    file = "vocab_rarity/vocab_rarity_sample_to_metric.bin"
    assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "drawn" / file).read_bytes()


TINY = (
    "--num-layers 1 --hidden-size 1 --num-attention-heads 1 --seq-length 16 --vocab-size 50 "
    "--max-position-embeddings 16 --micro-batch-size 10000 --global-batch-size 10000 --split 9,1,0 "
    "--distributed-backend gloo --return-data-index --save-interval 1 --data-impl mmap "
    "--tokenizer-type NullTokenizer --analyzing-data-type GPT"
).split()


def test_two_steps_with_the_flags_of_megatron_deepspeed(tmp_path):
    """No length of a run, no learning rate; the files are those of a run over as many epochs."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 50, rng.integers(5, 40)) for _ in range(30)]
    with IndexedDatasetWriter(tmp_path / "a", "uint16") as writer:
        for text in texts:
            writer.add_document([text])
    samples = (3 * sum(map(len, texts[:27])) - 1) // 16
    data = ["--data-path", str(tmp_path / "a"), "--train-data-exact-num-epochs", "3"]
    flags = [*TINY, *data, "--analyzing-num-workers", "2", "--analyzing-num-threads", "3"]
    for name in ("total_vocab_freq", "vocab_rarity"):
        common = [*flags, "--analyzing-metric", name, "--save", str(tmp_path / "two")]
        for worker in "01":
            analyze_data.main([*common, "--analyzing-task", "map", "--analyzing-worker-id", worker])
        analyze_data.main([*common, "--analyzing-task", "reduce"])
    counts = tmp_path / "two" / "total_vocab_freq" / "total_vocab_freq_metric_value"
    assert read_rows(counts).values.sum() == samples * 17
    run = [flag for flag in FLAGS if flag != "--mock-data"] + [*data, "--split", "9,1,0"]
    assert len(run_data(parse_run(None, run)).datasets.train) == samples
    analyze_data.main([*run, "--save", str(tmp_path / "one")])
    files = list((tmp_path / "one").glob("*/*.*"))
    assert len(files) == 9 + 3
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.parent.name / file.name).read_bytes()
    with pytest.raises(ValueError, match=f"epochs 3 makes {samples} training samples, and the run"):
        run_data(parse_run(None, [*run, "--train-iters", "500"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--analyzing-metric", "loss"],
            "--analyzing-metric loss must be one of total_vocab",
        ),
        (["--analyzing-num-threads", "0"], "--analyzing-num-threads 0 must be positive"),
        ([], "missing --save, the folder for the results"),
        (["--save", "/proc/none"], "--save /proc/none/any: cannot write to /proc/none"),
        (
            ["--analyzing-task", "map", "--analyzing-num-workers", "4", "--analyzing-worker-id=4"],
            "--analyzing-worker-id 4 must be from 0 to 3, one less than --analyzing-num-workers",
        ),
        (["--analyzing-num-workers", "2"], "--analyzing-num-workers 2 share the work in two steps"),
        (
            ["--analyzing-data-type", "BERT", "--model-family", "gpt"],
            "--analyzing-data-type BERT contradicts --model-family gpt",
        ),
    ],
)
def test_mistakes(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        analyze_data.main([*flags, *FLAGS])
    assert caught.value.code == 2
    assert f" error: {message}" in capsys.readouterr().err
