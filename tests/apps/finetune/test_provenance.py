"""Origin of an output folder, compared with what a command names."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from configs import model_config, run_config
from finetune_cases import save_blank

from megatron.apps.finetune import provenance
from megatron.apps.finetune.export import done_in
from megatron.apps.finetune.provenance import (
    Earlier,
    TuningRecord,
    base_name,
    changes_since,
    check_base,
)
from megatron.apps.finetune.settings import TuningConfig
from megatron.apps.finetune.summary import TuningSummary, model_card
from megatron.checkpoint.files import CheckpointError
from megatron.config import CheckpointConfig, ConfigError, DataConfig, RunConfig, TrainingConfig
from megatron.data.build import DataFile
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.keep_best.callback import stopped_early
from megatron.features.preference.flags import PreferenceConfig
from megatron.training.resume import ResumeSource

FILE = DataFile("train", "a.json", None, (0.0, 1.0), {"bytes": 9, "sample": "ab"})
OTHER = FILE._replace(path="b.json", content={"bytes": 8, "sample": "cd"})
HELD_OUT = FILE._replace(part="valid")


def changes(now: RunConfig, files=(FILE,), before=(FILE,), tmp_path=None):
    saved = json.loads(json.dumps([file._asdict() for file in before]))
    found = SimpleNamespace(folder=tmp_path)
    source = SimpleNamespace(state={"data": saved, "iteration": 6})
    earlier = Earlier(ResumeSource(found, "--output z", True), source, run_config())
    data = SimpleNamespace(files=lambda: list(files))
    return changes_since(earlier, now, data, "z")


OTHERWISE = {
    "seed": ({"training": TrainingConfig(seed=5)}, "--seed was 1234 and is 5"),
    "split": ({"data": DataConfig(split="9,1,0")}, "split of --held-out or --eval-data was 969"),
    "method": ({"sections": (AdapterConfig(lora=True),)}, "--lora was False and is True"),
    "rank": ({"sections": (AdapterConfig(lora_rank=4),)}, "--lora-rank was 8 and is 4"),
    "loss": (
        {"sections": (PreferenceConfig(preference="orpo"),)},
        "--preference was not given and is",
    ),
    "format": (
        {"sections": (InstructionConfig(prompt_format="plain"),)},
        "--prompt-format was auto",
    ),
    "packing": (
        {"sections": (InstructionConfig(packing=True),)},
        "--packing was False and is True",
    ),
    "length": ({"model": model_config(seq_length=16)}, "--seq-length was 8 and is 16"),
}


@pytest.mark.parametrize("parts, words", OTHERWISE.values(), ids=OTHERWISE)
def test_what_a_folder_has_once(tmp_path, parts, words):
    with pytest.raises(CheckpointError, match=words) as error:
        changes(run_config(**parts), tmp_path=tmp_path)
    assert str(error.value).startswith("--output z was made otherwise: ")
    allowed = CheckpointConfig(allow_changed_data=True)
    (line,) = changes(run_config(**parts, checkpoint=allowed), tmp_path=tmp_path)
    assert line in str(error.value)


@pytest.mark.parametrize(
    "files, before, words",
    [
        ((OTHER,), (FILE,), r"data: b.json \(before: a.json\): bytes was 9 and is 8"),
        ((FILE, OTHER), (FILE,), "train: 1 files, and 2 now"),
        ((FILE, OTHER._replace(part="valid")), (FILE, HELD_OUT), r"b.json \(before: a.json\)"),
    ],
)
def test_data_by_content(tmp_path, files, before, words):
    with pytest.raises(CheckpointError, match=words):
        changes(run_config(), files, before, tmp_path)


def test_moved_data_and_other_rates_are_the_same_folder(tmp_path):
    moved = FILE._replace(path="elsewhere/a.json")
    now = run_config(training=TrainingConfig(global_batch_size=8, eval_interval=3))
    assert changes(now, (moved,), tmp_path=tmp_path) == [
        f"--global-batch-size was {TrainingConfig().global_batch_size or 'not given'} and is 8"
    ]


def test_a_record_keeps_its_names_and_adds_what_changed():
    first = TuningRecord("A", ("a.json",), (), 1, 30, 6, "torch 2")
    source = SimpleNamespace(state={"iteration": 4, "tuning": first.to_json()}, folder="z")
    assert TuningRecord.of(SimpleNamespace(state=json.loads(json.dumps(source.state)))) == first
    later = TuningRecord("B", ("b.json",), (), 2, 30, 6, "torch 3").after(
        source, ["--lr was 1 and is 2"]
    )
    assert (later.model, later.data, later.epochs) == ("A", ("a.json",), 2)
    assert later.changes == ((4, "--lr was 1 and is 2"), (4, "programs: torch 3"))
    again = SimpleNamespace(state={"iteration": 8, "tuning": later.to_json()}, folder="z")
    assert later.after(again, []) == later
    with pytest.raises(CheckpointError, match="tuning is malformed"):
        TuningRecord.of(SimpleNamespace(state={"tuning": {"model": 1}}, folder="z"))


def test_a_card_is_of_the_checkpoint_and_not_of_the_command():
    """With what a resume changed, and the results of that step."""
    rows = [{"kind": "validation", "iteration": at, "lm loss": 9.0 - at} for at in (0, 2, 4)]
    wrong = TuningRecord("B", ("b.json",), (), 7, 8, 2, "torch 3")
    command = TuningSummary(run_config(optimizer=_rate(7.0)), wrong, 4, rows)
    first = TuningRecord("A", ("a.json",), (), 1, 8, 2, "torch 2", ((1, "--lr was 1 and is 2"),))
    state = {"iteration": 2, "tuning": first.to_json()}
    run = run_config(optimizer=_rate(2.0), training=TrainingConfig(global_batch_size=4))
    source = SimpleNamespace(state=state, run=run, additions=None, folder="z")
    card = model_card(done_in(source, command), "z", has_template=False)
    for line in (
        'base_model: "A"', "| Data | a.json |", "| Learning rate | 2, ", "| Programs | torch 2 |",
        "| lm loss | 9.0000 | 7.0000 |", "| Changed after step 1 | --lr was 1 and is 2 |",
        "| Length | 2 steps of 4 samples, 1 epoch |",
    ):  # fmt: skip
        assert line in card, card
    adapters = SimpleNamespace(state=state, run=None, additions=source, folder="z")
    assert done_in(adapters, command).config == run
    old = SimpleNamespace(state={"iteration": 4}, run=run, additions=None, folder="z")
    assert done_in(old, command).record == wrong


def _rate(lr: float):
    return dataclasses.replace(run_config().optimizer, lr=lr)


def test_folders_of_earlier_versions_are_compared_by_the_path_of_their_base(tmp_path, monkeypatch):
    base, other = save_blank(tmp_path / "A"), save_blank(tmp_path / "B")
    (other / "config.json").write_text((base / "config.json").read_text() + " ")
    step = tmp_path / "z" / "checkpoints" / "global_step3"
    step.mkdir(parents=True)
    (step / "config.json").write_text(json.dumps({"checkpoint": {"pretrained_checkpoint": "gone"}}))
    locate = provenance.locate_checkpoint
    newest = SimpleNamespace(folder=step)
    monkeypatch.setattr(
        provenance, "locate_checkpoint", lambda p: newest if "checkpoints" in str(p) else locate(p)
    )
    config = TuningConfig(model=str(base), output=str(tmp_path / "z"))
    with pytest.raises(ConfigError, match="was made from --model gone"):
        check_base(config)
    named = {"checkpoint": {"pretrained_checkpoint": str(base)}}
    (step / "config.json").write_text(json.dumps(named))
    check_base(config)
    with pytest.raises(ConfigError, match=f"was made from --model {base}, and --model {other}"):
        check_base(TuningConfig(model=str(other), output=str(tmp_path / "z")))


def test_the_name_of_a_base(tmp_path):
    cached = tmp_path / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "ab12"
    assert base_name(str(cached)) == "Qwen/Qwen2.5-0.5B"
    assert base_name(str(tmp_path / "mine")) == "mine"


def test_a_run_that_was_stopped_early_has_ended(tmp_path):
    """After the evaluation that stopped it, with the same patience."""
    path = tmp_path / "best_epoch.json"
    losses = [(1, 3.0), (2, 2.0), (3, None), (4, 2.5)]
    path.write_text(
        json.dumps({"evaluations": [{"iteration": at, "loss": loss} for at, loss in losses]})
    )
    assert stopped_early(tmp_path, 2, 4)
    for patience, iteration in ((None, 4), (3, 4), (2, 5)):
        assert not stopped_early(tmp_path, patience, iteration)
    path.unlink()
    assert not stopped_early(tmp_path, 2, 4)
