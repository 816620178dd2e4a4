"""examples_deepspeed/data_efficiency: positions, recipes, and what is gathered from logs."""

import json
import runpy
import statistics
import sys

import pytest
from example_scripts import FOLDER, ROOT, printed, script

from megatron.config import FLAG_CLASSES, FlagParser

SCRIPTS = FOLDER / "data_efficiency"
GPT = SCRIPTS / "gpt" / "pretrain"
BERT = SCRIPTS / "bert" / "pretrain"


def parsed(path, *words, **settings):
    """Settings and DeepSpeed JSON of a script's command."""
    _, flags = printed(path, *words, CHECKPOINT_PATH="", **settings)
    values = FlagParser(*FLAG_CLASSES).settings(flags)
    return values, json.loads((ROOT / values["deepspeed_config"].value).read_text())


def test_positions_and_recipes_of_the_gpt(tmp_path):
    """27 positions by hand are what the recipe of the same name gives."""
    place = {"OUTPUT_BASEPATH": str(tmp_path), "INDEX_HOME": "ana"}
    by_hand = (
        "4.0e-4 150 false 2048 1 true 2 voc "
        "ana/vocab_rarity/vocab_rarity_index_to_sample_percentile_merged "
        "ana/vocab_rarity/vocab_rarity_index_to_metric percentile schedule_based 1 100 55000 1 2 "
        "seqlen_truncate dummy dummy value single_cluster 80 2048 55000 8 1"
    ).split()
    values, section = parsed(GPT / "ds_pretrain_gpt_1.3B_dense_base_script.sh", *by_hand, **place)
    again, same = parsed(GPT / "ds_pretrain_gpt_1.3B_dense_run.sh", "cl_voc_truncate_150B", **place)
    assert section == same
    expected = {
        "lr": 4e-4, "min_lr": 1e-6, "train_tokens": 150 * 10**9, "global_batch_size": 512,
        "train_samples": 300 * 10**9 * 2 // 2048, "lr_decay_tokens": 150 * 10**9,
        "lr_warmup_tokens": 3 * 10**9, "save_interval": 150 * 10**9 // 2048 // 512 // 100,
    }  # fmt: skip
    assert {name: values[name].value for name in expected} == expected
    assert {name: again[name].value for name in expected} == expected
    sampling = section["data_efficiency"]["data_sampling"]
    metrics = sampling["curriculum_learning"]["curriculum_metrics"]
    assert list(metrics) == ["voc", "seqlen_truncate"] and sampling["enabled"] is True
    assert metrics["voc"]["difficulty_type"] == "percentile"
    schedule = metrics["seqlen_truncate"]["schedule_config"]
    assert schedule == {"total_curriculum_step": 55000, "difficulty_step": 8, "root_degree": 1}
    assert section["data_efficiency"]["data_routing"]["enabled"] is False


def test_tokens_of_the_bert(tmp_path):
    place = {"OUTPUT_BASEPATH": str(tmp_path)}
    values, section = parsed(BERT / "ds_pretrain_bert_336M_run.sh", "cl_truncate_1049B", **place)
    tokens = 2 * 10**6 * 512 * 1024
    expected = {"train_tokens": tokens, "lr_decay_tokens": tokens, "train_iters": 4_000_000}
    assert {name: values[name].value for name in expected} == expected
    sampling = section["data_efficiency"]["data_sampling"]["curriculum_learning"]
    schedule = sampling["curriculum_metrics"]["seqlen_truncate"]
    assert (schedule["min_difficulty"], schedule["max_difficulty"]) == (128, 512)
    assert schedule["schedule_config"]["total_curriculum_step"] == 960_000


@pytest.mark.parametrize("words", [(), ("other",)])
def test_a_recipe_has_to_be_named(words):
    done = script(BERT / "ds_pretrain_bert_336M_run.sh", *words, DRY_RUN="")
    assert done.returncode == 1 and "uncomment one block" in done.stderr
    assert "baseline_1049B" in done.stderr


@pytest.mark.parametrize(
    ("path", "recipe", "length", "steps", "kind"),
    [
        (GPT / "ds_pretrain_gpt_1.3B_dense_run.sh", "cl_ltd_150B", 2048, 100_000, "decoder"),
        (BERT / "ds_pretrain_bert_336M_run.sh", "ltd_703B", 512, 1_340_000, "encoder"),
    ],
)
def test_layers_that_drop_tokens(path, recipe, length, steps, kind, tmp_path):
    """All but the first and the last, of as many as the model has."""
    values, section = parsed(path, recipe, OUTPUT_BASEPATH=str(tmp_path))
    routing = section["data_efficiency"]["data_routing"]
    dropping = routing["random_ltd"]
    assert values["random_ltd"].value and routing["enabled"] and dropping["enabled"]
    assert dropping["random_ltd_layer_id"] == list(range(1, 23))
    assert (dropping["total_layer_num"], dropping["random_ltd_layer_num"]) == (24, 22)
    assert dropping["model_type"] == kind
    assert dropping["random_ltd_schedule"] == {
        "min_value": 128, "max_value": length, "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": steps, "seq_per_step": 16},
    }  # fmt: skip
    small = parsed(path, recipe, "--num-layers", "4", OUTPUT_BASEPATH=str(tmp_path))[1]
    dropping = small["data_efficiency"]["data_routing"]["random_ltd"]
    assert dropping["random_ltd_layer_id"] == [1, 2] and dropping["total_layer_num"] == 4


def gathered(program, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(program), str(folder)])
    runpy.run_path(str(program), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("folder", ["finetune", "finetune_glue"])
def test_results_over_seeds(folder, tmp_path, monkeypatch, capsys):
    """The best epoch of each seed, and their median."""
    accuracies = {1: (70.5, 71.5), 2: (74.0, 73.0), 3: (72.0, 72.5)}
    for seed, epochs in accuracies.items():
        lines = [
            f" > |epoch: {n}| metrics for dev: correct / total = 1 / 2 = {v:.4f} %, elapsed\n"
            f" >> |epoch: {n}| overall: correct / total = 1 / 2 = {v:.4f} %\n"
            for n, v in enumerate(epochs)
        ]
        name = f"QQP-bsz32-lr2.0e-5-epochs2-seed{seed}_host_date.log"
        (tmp_path / name).write_text("".join(lines))
        text = f" >> |epoch: 0| overall: pearson = .1 spearmanr = 0.8{seed} corr = .2\n"
        (tmp_path / f"STS-B-bsz32-lr5e-5-epochs3-seed{seed}_h.log").write_text(text)
    program = SCRIPTS / "bert" / folder / "ds_finetune_gather_result.py"
    first, second = gathered(program, tmp_path, monkeypatch, capsys)
    best = [max(epochs) for epochs in accuracies.values()]
    assert first == (
        f"QQP lr 2.0e-5: median {statistics.median(best):.2f} (dev 72.50), mean "
        f"{statistics.mean(best):.2f}, std {statistics.stdev(best):.2f}, seeds 1 2 3"
    )
    assert second.startswith("STS-B lr 5e-5: median 82.00")


def test_average_accuracy(tmp_path, monkeypatch, capsys):
    results = {"lambada": {"ppl": 9.0, "acc": 0.25, "acc_stderr": 0.1}, "webqs": {"em": 0.75}}
    (tmp_path / "a,b_0shot.json").write_text(json.dumps({"results": results}))
    perplexity = {"results": {"wikitext": {"word_perplexity": 30.0}}}
    (tmp_path / "wikitext_0shot.json").write_text(json.dumps(perplexity))
    program = SCRIPTS / "gpt" / "eval" / "ds_evalharness_gather_result.py"
    lines = gathered(program, tmp_path, monkeypatch, capsys)
    assert lines[-1] == "average accuracy of 2 tasks: 0.5000"
    assert "lambada (0shot): ppl 9.0 acc 0.25" in lines
