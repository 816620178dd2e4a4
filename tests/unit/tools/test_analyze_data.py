"""tools/analyze_data.py: the samples of a run's flags, and mistakes."""

import json

import pytest

from megatron.data.kinds.curriculum.analysis import read_rows
from megatron.training.run import parse_run, run_data
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--analyzing-metric", "loss"], "--analyzing-metric loss must be one of seqlen, vocab"),
        (["--analyzing-num-threads", "0"], "--analyzing-num-threads 0 must be positive"),
        ([], "missing --save, the folder for the results"),
    ],
)
def test_mistakes(flags, message):
    with pytest.raises(SystemExit) as caught:
        analyze_data.main([*flags, *FLAGS])
    assert str(caught.value).startswith(f"analyze_data.py: error: {message}")
