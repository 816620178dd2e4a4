"""Our curricula against DeepSpeed's own scheduler, sampler and analyzer."""

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

from megatron.config.kinds.curriculum import CurriculumConfig, data_sampling, sequence_lengths
from megatron.data.index_cache import IndexCache
from megatron.data.kinds.curriculum.analysis import analyse, read_rows, write_rows
from megatron.data.kinds.curriculum.order import difficulty, draw_samples, stages
from megatron.data.sampler import MicroBatchSampler
from megatron.engine.deepspeed_json import section_text


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


def test_files_against_deepspeeds_analyzer(tmp_path):
    """Byte for byte, read by DeepSpeed and read by us. (Merging leaves DeepSpeed another document
    boundary, behind which there is nothing.)"""
    rng = np.random.default_rng(3)
    data = torch.from_numpy(rng.integers(0, 60, (257, 5)))
    counts = torch.bincount(data.reshape(-1), minlength=60 + 1)
    token_rarity = -torch.log(counts.clamp(min=1) / counts.clamp(min=1).sum())

    def vocab_rarity(batch):
        return torch.stack([token_rarity.double()[row].sum() for row in batch]).long()

    DataAnalyzer(
        list(data), batch_size=16, metric_names=["vocab_rarity", "total_vocab_freq"],
        metric_functions=[
            vocab_rarity, lambda batch: torch.bincount(batch.reshape(-1), minlength=61)
        ],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"],
        metric_dtypes=[torch.int64, torch.int64], save_path=str(tmp_path / "theirs"),
    ).run_map()  # fmt: skip
    analyzer = DataAnalyzer(
        list(data), metric_names=["vocab_rarity", "total_vocab_freq"],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"],
        save_path=str(tmp_path / "theirs"),
    )  # fmt: skip
    analyzer.run_reduce()
    analyse([sample.numpy() for sample in data], ["vocab_rarity"], tmp_path / "ours", 60)
    files = (
        "index_to_metric", "index_to_sample", "index_to_sample_percentile_merged",
        "sample_to_metric",
    )  # fmt: skip
    names = [f"vocab_rarity/vocab_rarity_{file}" for file in files]
    for name in [*names, "total_vocab_freq/total_vocab_freq_metric_value"]:
        ours, theirs = tmp_path / f"ours/{name}", tmp_path / f"theirs/{name}"
        assert ours.with_suffix(".bin").read_bytes() == theirs.with_suffix(".bin").read_bytes()
        read, rows = MMapIndexedDataset(str(ours), skip_warmup=True), read_rows(str(ours))
        header, body = 9 + 8 + 1 + 8, 8 + 12 * len(rows)  # the number of boundaries, the rows
        mine, other = (p.with_suffix(".idx").read_bytes() for p in (ours, theirs))
        assert mine[:header] == other[:header]
        assert mine[header + 8 : header + body] == other[header + 8 : header + body]
        assert len(read) == len(rows)
        assert all(np.array_equal(read[row], rows[row]) for row in range(len(rows)))


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
