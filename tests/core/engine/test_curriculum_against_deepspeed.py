"""Our curricula against DeepSpeed's own scheduler, sampler and analyzer."""

import math
import random
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.data_pipeline.data_sampling import data_sampler
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

from megatron.data.index_cache import IndexCache
from megatron.data.sampler import MicroBatchSampler
from megatron.engine.deepspeed_json import section_text
from megatron.features.curriculum.analysis import METRICS, Analysis, Share
from megatron.features.curriculum.flags import CurriculumConfig, data_sampling, sequence_lengths
from megatron.features.curriculum.metric_files import read_rows, write_rows
from megatron.features.curriculum.order import difficulty, draw_samples, stages
from megatron.features.masked.batch import BertSample


def schedules():
    rng = random.Random(5)
    for kind in ("fixed_linear", "fixed_root", "fixed_discrete"):
        for number in range(40):
            yield pytest.param(kind, rng.random(), id=f"{kind}-{number}")


def random_section(kind, seed):
    rng = random.Random(seed)
    increment = rng.choice([8, 16, 24, 64])
    highest = increment * rng.randrange(1, 40)
    section = {
        "min_difficulty": rng.randrange(1, highest + 1),
        "max_difficulty": highest,
        "schedule_type": kind,
    }
    if kind == "fixed_discrete":
        values = sorted(rng.sample(range(8, 8000, 8), rng.randrange(2, 9)))
        steps = sorted(rng.sample(range(1, 500), len(values) - 1))
        section |= {"min_difficulty": values[0], "max_difficulty": values[-1]}
        return section | {"schedule_config": {"difficulty": values, "max_step": steps}}
    config = {"total_curriculum_step": rng.randrange(1, 600), "difficulty_step": increment}
    if kind == "fixed_root":
        config["root_degree"] = rng.choice([1, 2, 3, 0.5])
    return section | {"schedule_config": config}


@pytest.mark.parametrize(("kind", "seed"), list(schedules()))
def test_difficulties_against_deepspeed(kind, seed):
    section = random_section(kind, seed)
    theirs = CurriculumScheduler(section)
    wanted = [theirs.update_difficulty(step) for step in range(1, 800)]
    text = section_text({"enabled": True, "curriculum_type": "seqlen", **section})
    schedule = sequence_lengths(CurriculumConfig(curriculum_learning=text))
    assert [difficulty(schedule, step) for step in range(1, 800)] == wanted
    changes = [n for n in range(1, 800) if n == 1 or wanted[n - 1] != wanted[n - 2]]
    assert list(stages(schedule)) == [(step, wanted[step - 1]) for step in changes]


SAMPLES = 300
VALUE = {"difficulty_type": "value", "clustering_type": "schedule_based"}
PERCENTILE = {"difficulty_type": "percentile", "clustering_type": "schedule_based"}
LINEAR = {"schedule_type": "fixed_linear"}
CASES = {
    "value": {
        "rarity": {
            **VALUE, **LINEAR, "min_difficulty": 10, "max_difficulty": 100,
            "schedule_config": {"total_curriculum_step": 30, "difficulty_step": 10},
        }
    },
    "percentile": {
        "rarity": {
            **PERCENTILE, "min_difficulty": 3, "max_difficulty": 100, "schedule_type": "fixed_root",
            "schedule_config": {
                "total_curriculum_step": 40, "difficulty_step": 1, "root_degree": 2
            },
        }
    },
    "two metrics": {
        "rarity": {
            **VALUE, **LINEAR, "min_difficulty": 50, "max_difficulty": 100,
            "schedule_config": {"total_curriculum_step": 40, "difficulty_step": 25},
        },
        "length": {
            **PERCENTILE, "min_difficulty": 10, "max_difficulty": 90,
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [30, 60, 90], "max_step": [10, 30]},
        },
    },
    "value and sequence length": {
        "rarity": {
            **VALUE, **LINEAR, "min_difficulty": 30, "max_difficulty": 100,
            "schedule_config": {"total_curriculum_step": 30, "difficulty_step": 5},
        },
        "seqlen_truncate": {
            "difficulty_type": "value", "clustering_type": "single_cluster", **LINEAR,
            "min_difficulty": 8, "max_difficulty": 64,
            "schedule_config": {"total_curriculum_step": 37, "difficulty_step": 8},
        },
    },
    "sequence length alone": {
        "seqlen_truncate": {
            "difficulty_type": "value", "clustering_type": "single_cluster", **LINEAR,
            "min_difficulty": 8, "max_difficulty": 64,
            "schedule_config": {"total_curriculum_step": 37, "difficulty_step": 8},
        },
    },
}  # fmt: skip


class Numbers:
    """Sample i is [i]."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return np.array([index])

    def origin(self, index):
        return ()


def data_efficiency(folder, metrics, values):
    """A section of DeepSpeed's JSON, and the files it names."""
    for name, sample_values in values.items():
        order = np.argsort(sample_values, kind="stable")
        unique, counts = np.unique(sample_values, return_counts=True)
        write_rows(str(folder / f"{name}_samples"), order, counts)
        write_rows(str(folder / f"{name}_values"), unique, np.ones_like(unique))
    files = {
        name: {
            "index_to_sample_path": str(folder / f"{name}_samples"),
            "index_to_metric_path": str(folder / f"{name}_values"),
        }
        for name in values
    }
    learning = {
        "enabled": True,
        "data_cluster_path": str(folder / "clusters"),
        "curriculum_metrics": {n: m | files.get(n, {}) for n, m in metrics.items()},
    }
    sampling = {"enabled": True, "num_epochs": 1000, "curriculum_learning": learning}
    return {"enabled": True, "seed": 77, "data_sampling": sampling}


def metric_values():
    rng = np.random.default_rng(1)
    return {"rarity": rng.integers(1, 101, SAMPLES), "length": rng.integers(1, 40, SAMPLES)}


@pytest.mark.parametrize("case", CASES)
def test_order_against_deepspeeds_sampler(case, tmp_path, monkeypatch):
    """What each of two data-parallel ranks reads in each of two micro steps of 60 steps: over all
    stages of the schedules, and with every cluster gone through several times."""
    steps, micro, ranks, accumulation = 60, 4, 2, 2
    monkeypatch.setattr(
        data_sampler,
        "dist",
        SimpleNamespace(barrier=lambda **_: None, broadcast=lambda *_, **__: 0),
    )
    values = {n: v for n, v in metric_values().items() if n in CASES[case]}
    section = data_efficiency(tmp_path, CASES[case], values)
    config = data_sampling(CurriculumConfig(data_efficiency=section_text(section)))
    batches = [(micro * ranks * accumulation, steps)]
    drawn = draw_samples(Numbers(), config, batches, steps * batches[0][0], IndexCache(None))
    for rank in range(ranks):
        section["data_sampling"]["curriculum_learning"]["data_cluster_path"] = str(
            tmp_path / f"clusters{rank}"
        )
        theirs = data_sampler.DeepSpeedDataSampler(
            get_data_efficiency_config({"data_efficiency": section}),
            SAMPLES, micro, rank, ranks, SimpleNamespace(size=lambda: ranks), accumulation,
            global_rank=0,
        )  # fmt: skip
        wanted = list(islice(iter(theirs), steps * accumulation))
        ours = MicroBatchSampler(len(drawn), 0, micro, rank, ranks)
        found = [[int(drawn[i][0]) for i in numbers] for numbers in ours]
        assert found == wanted


VOCABULARY, LENGTH = 60, 9


class Texts:
    """Samples of 3 to 9 tokens."""

    def __len__(self):
        return 257

    def __getitem__(self, index):
        rng = np.random.default_rng([3, index])
        tokens = (VOCABULARY * rng.random(rng.integers(3, LENGTH + 1)) ** 2).astype(np.int64)
        parts = np.zeros_like(tokens), np.array([1]), tokens[1:2].copy(), 0
        tokens[1] = VOCABULARY - 1  # the mask
        return BertSample.padded(tokens, *parts, seq_length=LENGTH, pad=0)

    def origin(self, index):
        return ()


def theirs_of_texts(folder, workers, threads):
    """The files of DeepSpeed's analyzer with the metrics of Megatron-DeepSpeed, written out here:
    BERT's samples there are not masked."""

    class Dicts(Texts):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            text = np.where(sample.labels_S >= 0, sample.labels_S, sample.tokens_S)
            mask = sample.padding_mask_S
            return {"text": text, "padding_mask": mask, "index": np.array([index])}

    def frequency(batch):
        real = batch["text"][batch["padding_mask"] > 0]
        return torch.bincount(real, minlength=VOCABULARY + 1)

    rarity_V = torch.zeros(0)

    def rarity(batch):
        return (batch["padding_mask"] * rarity_V[batch["text"]]).sum(1).to(torch.long)

    def length(batch):
        return torch.count_nonzero(batch["padding_mask"], dim=1)

    def both(batch):
        power = math.ceil(math.log(LENGTH * rarity_V.max().item(), 10)) + 1
        return length(batch) * 10**power + rarity(batch)

    for name, metric in zip(METRICS, (frequency, rarity, both, length), strict=True):
        kind = "accumulate_value_over" if metric is frequency else "single_value_per"
        kind = f"{kind}_sample{'s' * (metric is frequency)}"
        for worker in range(workers):
            DataAnalyzer(
                Dicts(), workers, worker, threads, batch_size=16, metric_names=[name],
                metric_functions=[metric], metric_types=[kind], metric_dtypes=[torch.int64],
                save_path=str(folder),
            ).run_map()  # fmt: skip
        DataAnalyzer(
            Dicts(), workers, num_threads=threads, metric_names=[name], metric_types=[kind],
            save_path=str(folder),
        ).run_reduce()  # fmt: skip
        if metric is frequency:
            counts = read_rows(folder / name / f"{name}_metric_value").values.astype(np.int64)
            counts[counts == 0] = 1
            rarity_V = torch.from_numpy(-np.log(counts / counts.sum()))


def same_file(ours, theirs):
    """Byte for byte; and DeepSpeed reads ours as we do. (Merging leaves DeepSpeed another document
    boundary, behind which there is nothing.)"""
    assert ours.with_suffix(".bin").read_bytes() == theirs.with_suffix(".bin").read_bytes()
    read, rows = MMapIndexedDataset(str(ours), skip_warmup=True), read_rows(ours)
    header, body = 9 + 8 + 1 + 8, 8 + 12 * len(rows)  # the number of boundaries, the rows
    mine, other = (p.with_suffix(".idx").read_bytes() for p in (ours, theirs))
    assert mine[:header] == other[:header]
    assert mine[header + 8 : header + body] == other[header + 8 : header + body]
    assert len(read) == len(rows)
    assert all(np.array_equal(read[row], rows[row]) for row in range(len(rows)))


FILES = (
    "index_to_metric", "index_to_sample", "index_to_sample_percentile_merged", "sample_to_metric",
)  # fmt: skip


def test_files_against_deepspeeds_analyzer(tmp_path):
    """All metrics, in one worker of DeepSpeed and three with two threads each of ours; and the
    reduce of ours after DeepSpeed's map."""
    theirs = tmp_path / "theirs"
    theirs_of_texts(theirs, 1, 1)
    for name in METRICS:
        analysis = Analysis(Texts(), (name,), tmp_path, VOCABULARY, LENGTH, 3, 2)
        for worker in range(3):
            analysis.map(worker)
        analysis.reduce(processes=2)
        for file in ("metric_value",) if name == METRICS[0] else FILES:
            same_file(tmp_path / name / f"{name}_{file}", theirs / name / f"{name}_{file}")
        after = Analysis(Texts(), (name,), theirs, VOCABULARY, LENGTH)
        part = Share(0, 0, range(257)).folder(theirs / name)
        assert part.is_dir() and not (part / "dataset.json").exists()
        after.reduce()
        for file in ("metric_value",) if name == METRICS[0] else FILES:
            same_file(tmp_path / name / f"{name}_{file}", theirs / name / f"{name}_{file}")


@pytest.mark.parametrize(
    "values", [[0, 255], [256], [65536], [2**32], [-1, 127], [-129], [-40000], [-(2**40)], []]
)
def test_dtypes_that_deepspeed_reads(values, tmp_path):
    path = str(tmp_path / "file")
    write_rows(path, np.array(values, np.int64), [len(values)] * (len(values) > 0))
    if values:
        theirs = MMapIndexedDataset(path, skip_warmup=True)  # its rows do not survive it
        assert theirs[0].tolist() == values
        assert read_rows(path)[0].tolist() == values
    assert read_rows(path).values.tolist() == values
