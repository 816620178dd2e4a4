"""The samples of a Retro's run: text and neighbours from a project in upstream's layout."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from upstream_retro import EOD, WrittenProject, small_project

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, Setting
from megatron.data.loader import MicroBatches
from megatron.features.curriculum.analysis import fingerprint, sample_tokens
from megatron.features.evaluation.checkpoints import MadeSamples
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.project import retro_settings
from megatron.run.run import Run, run_data, run_of
from megatron.training.plan import TrainingPlan
from tools.show_batch import main as show_batch

h5py = pytest.importorskip("h5py")

SEQ, CHUNK = 64, 16
CHUNKS = SEQ // CHUNK
TRAIN, BATCH = 24, 4
COUNTS = {"train": 24, "valid": 16, "test": 8}
"""Of 6 steps with evaluations of 2 batches after step 5 and at the end."""
MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1 --num-workers 0 --torch-compile off"
).split()


@pytest.fixture
def project(tmp_path: Path) -> WrittenProject:
    return small_project(tmp_path)


def run(*flags: str, family: str = "retro") -> Run:
    settings = FlagParser(*FLAG_CLASSES).settings([*MODEL, *flags])
    return run_of(settings | {"family": Setting(family, "this program")}, 1)


def retro(project: WrittenProject, *flags: str) -> Run:
    return run("--retro-add-retriever", "--retro-project-dir", str(project.folder), *flags)


def expected_tokens(project: WrittenProject, chunk: int) -> list[int]:
    """A neighbour with its continuation, from the documents and the table alone."""
    if chunk < 0:
        return [EOD] * 2 * CHUNK
    dataset, document, start, _, _ = project.table[chunk].tolist()
    text = project.corpora[dataset].documents[document][start : start + 2 * CHUNK].tolist()
    return text + [EOD] * (2 * CHUNK - len(text))


def test_samples_are_a_gpts_with_the_neighbours_of_the_files(
    project: WrittenProject,
) -> None:
    found = run_data(retro(project)).datasets
    gpt = run(*gpt_argv(project), family="gpt")
    text = run_data(gpt).datasets
    pairs = {"train": (found.train, text.train)}
    pairs |= {part: (getattr(found, part)[part], getattr(text, part)[part])
              for part in ("valid", "test")}  # fmt: skip
    for part, (samples, plain) in pairs.items():
        assert len(samples) == COUNTS[part]
        for number in range(len(samples)):
            sample, chunks_LK = samples[number], project.rows[part][number, :, :2]
            np.testing.assert_array_equal(sample.text, plain[number])
            np.testing.assert_array_equal(sample.chunks_LK, chunks_LK)
            expected = [[expected_tokens(project, k) for k in row] for row in chunks_LK.tolist()]
            assert sample.neighbors_LKR.tolist() == expected
            assert samples.origin(number) == plain.origin(number)


def gpt_argv(project: WrittenProject) -> list[str]:
    """What a GPT's run on the same data is given."""
    settings = json.loads((project.folder / "config.json").read_text())
    values = {name.removeprefix("retro_gpt_"): value for name, value in settings.items()
              if name.startswith("retro_gpt_") and name != "retro_gpt_chunk_length"}  # fmt: skip
    argv: list[str] = []
    for name, value in values.items():
        words = value if isinstance(value, list) else [value]
        argv += [f"--{name.replace('_', '-')}", *map(str, words)]
    return argv


def test_batches_and_the_documents_that_they_are_from(project: WrittenProject) -> None:
    data = run_data(retro(project, "--retro-return-doc-ids"))
    train = data.datasets.train
    batches = data.batches(pickle.loads(pickle.dumps(train)), micro_batch_size=2, num_workers=1)
    batch = next(batches)
    batches.close()
    assert batch.neighbors_BLKR.shape == (2, CHUNKS, 2, 2 * CHUNK)
    for row in range(2):
        sample = train[row]
        assert batch.neighbors_BLKR[row].tolist() == sample.neighbors_LKR.tolist()
        assert batch.tokens_BS[row].tolist() == sample.text[:-1].tolist()
        names = [each.name for each in project.corpora]
        documents = {(names.index(Path(p.source).name), p.sequence) for p in train.origin(row)}
        rows = [tuple(pair) for pair in batch.documents_BD2[row].tolist()]
        assert {pair for pair in rows if pair != (-1, -1)} == documents
    assert next(iter(MicroBatches(run_data(retro(project)).datasets.train, data.collate,
                                  micro_batch_size=1))).documents_BD2 is None  # fmt: skip


def test_a_shortened_batch_has_the_neighbours_of_its_chunks(project: WrittenProject) -> None:
    data = run_data(retro(project, "--reset-attention-mask"))
    batch = data.collate([data.datasets.train[number] for number in range(2)])
    short = batch.shortened(2 * CHUNK)
    assert torch.equal(short.tokens_BS, batch.tokens_BS[:, : 2 * CHUNK])
    assert torch.equal(short.neighbors_BLKR, batch.neighbors_BLKR[:, :2])
    assert short.text.document_ids_BS.shape == (2, 2 * CHUNK)


def test_the_project_says_the_data_over_the_flags(project: WrittenProject, caplog) -> None:
    caplog.set_level("INFO", "megatron")
    found = retro(project, "--seq-length", "32", "--train-iters", "3", "--seed", "1234")
    config, origins = found.config, found.resolved.origins
    assert config.model.seq_length == SEQ and config.training.length == ("samples", TRAIN)
    assert config.model.part(RetrievalConfig).retro_gpt_chunk_length == CHUNK
    assert config.training.eval_interval == 5 and config.training.global_batch_size == BATCH
    assert origins["seq_length"].endswith("config.json: retro_gpt_seq_length")
    log = caplog.text
    assert "--seq-length 32 is not used" in log and f"retro_gpt_seq_length is {SEQ}" in log
    assert "--train-iters 3 is not used" in log and "--exit-interval" in log
    assert "--seed 1234 is not used" not in log
    assert TrainingPlan(config).sample_counts == tuple(COUNTS.values())


def test_a_gpt_for_comparison_reads_the_same_samples(project: WrittenProject) -> None:
    found = run("--retro-project-dir", str(project.folder))
    assert found.config.model.family == "gpt"
    train, text = run_data(found).datasets.train, run_data(retro(project)).datasets.train
    for number in range(TRAIN):
        np.testing.assert_array_equal(train[number], text[number].text)


def test_cyclic_runs_read_the_samples_again(project: WrittenProject, caplog) -> None:
    """So many that the order of a GPT that reads as many samples differs from the first on."""
    caplog.set_level("INFO", "megatron")
    cyclic = ["--dataloader-type", "cyclic", "--retro-cyclic-train-iters", "300"]
    found = retro(project, *cyclic)
    assert TrainingPlan(found.config).train_iters == 300
    datasets = run_data(found).datasets
    assert len(datasets.train) == 1200 and len(datasets.valid["valid"]) == 488
    plain = run_data(retro(project)).datasets.train
    for number in range(TRAIN):
        first, second = plain[number], datasets.train[number + TRAIN]
        np.testing.assert_array_equal(first.text, datasets.train[number].text)
        np.testing.assert_array_equal(first.text, second.text)
        np.testing.assert_array_equal(first.neighbors_LKR, second.neighbors_LKR)
    once = retro(project, "--retro-cyclic-train-iters", "300")
    assert TrainingPlan(once.config).train_iters == 6
    assert "--retro-cyclic-train-iters 300 is not used" in caplog.text


def test_another_number_of_samples(project: WrittenProject) -> None:
    settings = json.loads((project.folder / "config.json").read_text())
    settings["retro_gpt_train_samples"] = 28
    (project.folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="24 samples for train.* 28.*--retro-gpt-train-samples"):
        run_data(retro(project))
    train = run_data(retro(project, "--retro-no-verify-neighbor-count")).datasets.train
    assert len(train) >= 28 and (train[TRAIN - 1].chunks_LK >= 0).any()
    assert (train[TRAIN].chunks_LK == -1).all() and (train[TRAIN].neighbors_LKR == EOD).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--valid-data-path", "x"], "--valid-data-path x contradicts --retro-project-dir"),
        (["--mock-data"], "--mock-data True contradicts"),
        (["--fim-data"], "--fim-data"),
        (["--retro-num-neighbors", "4"], "--retro-num-neighbors 4: .* has 3 neighbours"),
        (["--rampup-batch-size", "2", "2", "24"], "samples for valid.*--rampup-batch-size"),
    ],
)
def test_what_contradicts_the_project(
    project: WrittenProject, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_data(retro(project, *flags))


def test_a_missing_stage_is_named(project: WrittenProject) -> None:
    argv = gpt_argv(project)
    settings = json.loads((project.folder / "config.json").read_text())
    settings["retro_neighbor_dirs"] = {}
    (project.folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="query-"):
        run_data(retro(project))
    (project.folder / "db" / "merged" / "train.hdf5").unlink()
    settings["retro_neighbor_dirs"] = {part: f"query/{part}_0a1b" for part in COUNTS}
    (project.folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="db-build"):
        run_data(retro(project))
    (project.folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        retro(project)
    with pytest.raises(ConfigError, match="needs --retro-project-dir"):
        run_data(run("--retro-add-retriever", *argv, "--retro-chunk-length", "16"))
    program = {
        "family": Setting("retro", "this program"),
        "retro_add_retriever": Setting(True, "flag --retro-add-retriever"),
    }
    with pytest.raises(ConfigError, match="needs --retro-project-dir"):
        retro_settings(program)  # before anything else that is missing
    assert retro_settings(program | {"mock_data": Setting(True, "flag --mock-data")})


def test_a_curriculum_has_whole_chunks(project: WrittenProject) -> None:
    def lengths(step: int) -> TrainingPlan:
        curriculum = {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": step,
            "max_difficulty": SEQ, "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 16, "difficulty_step": step},
        }  # fmt: skip
        path = project.folder / "ds.json"
        path.write_text(json.dumps({"curriculum_learning": curriculum}))
        return TrainingPlan(retro(project, "--deepspeed_config", str(path)).config)

    assert lengths(CHUNK).lengths.at(0) == CHUNK
    with pytest.raises(ConfigError, match="8 tokens.*--retro-gpt-chunk-length 16"):
        lengths(8)


def test_difficulties_are_those_of_the_text(project: WrittenProject) -> None:
    """Which a GPT's analysis of the same samples says, too."""
    train = run_data(retro(project)).datasets.train
    text = run_data(run("--retro-project-dir", str(project.folder))).datasets.train
    np.testing.assert_array_equal(sample_tokens(train[5]), sample_tokens(text[5]))
    first = MadeSamples(range(TRAIN), text.__getitem__)
    assert fingerprint(train) == fingerprint(first)


def test_show_batch_prints_the_neighbours(project: WrittenProject, capsys) -> None:
    flags = [*MODEL, "--model-family", "retro", "--retro-project-dir", str(project.folder)]
    show_batch([*flags, "--max-characters", "0"])
    text = capsys.readouterr().out
    show_batch([*flags, "--json"])
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    number = samples[0]["sample"]
    found = samples[0]["neighbors"]
    known = [k for row in project.rows["train"][number, :, :2].tolist() for k in row if k >= 0]
    assert len(found) == len(known)
    for neighbor, chunk in zip(found, known, strict=True):
        dataset, document, start, end, _ = project.table[chunk].tolist()
        assert neighbor["piece"]["sequence"] == document
        assert (neighbor["piece"]["start"], neighbor["piece"]["stop"]) == (start, end)
        source = neighbor["piece"]["source"]
        assert source.endswith(project.corpora[dataset].name)
        assert f"{source}: document {document}, tokens {start} to {end - 1}\n" in text
        assert f"      | {neighbor['text'].splitlines()[0]}" in text
    assert "chunk 1, neighbour 1: " in text
