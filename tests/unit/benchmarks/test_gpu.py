"""benchmarks/gpu.py: which measurements there are, and that what is done stays done."""

import json
import sys

import gpu
import gpu_suite.run
import pytest
from gpu_suite.plan import CONFIGS, PARTS, SCALES, Job, jobs
from gpu_suite.run import Results, run_all
from gpu_suite.table import markdown

FOUND = {
    "machine": {
        "device": "NVIDIA H100", "peak_flops": 989e12, "peak_is": "data sheet", "cores": 16,
        "torch": "2.13", "cuda": "13.0", "deepspeed": "0.19.8", "transformers": "5",
        "python": "3.11",
    },
    "setting": {"micro_batch": 4, "micro_batches": 2},
    "contestants": {"ours": {"rounds": [{}]}},
    "summaries": {
        "ours": {
            "seconds_per_step": 0.5, "tokens_per_second": 12345.6, "mfu_causal": 0.571,
            "mfu_whole": 0.602, "peak_bytes": 7.25e10, "first_loss": 10.825, "last_loss": 9.5,
        }
    },
}  # fmt: skip
WRITE = "import sys; open(sys.argv[-1], 'w').write(sys.argv[1]); print('done')"


def job(variant: str, code: str = WRITE, found: dict | None = None, timeout: float = 60.0) -> Job:
    command = (sys.executable, "-c", code, json.dumps(found or FOUND))
    return Job("sizes", "1.3B", 2048, variant, "ours", command, timeout)


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results")


def run(work, results, limit=None) -> tuple[bool, list[str], int]:
    said, tables = [], []
    done = run_all(
        work, results, limit, said.append, lambda: tables.append(markdown(work, results))
    )
    return done, said, len(tables)


def test_full_scale_measures_what_it_is_for():
    work = jobs(SCALES["full"], PARTS, lambda name: f"/{name}.json")
    assert len({job.name for job in work}) == len(work)
    trains = [job for job in work if job.part != "tests"]
    for size in ("124M", "350M", "1.3B", "3B", "7B"):
        lengths = {job.seq_length for job in trains if job.model == size}
        assert lengths == {1024, 2048, 4096, 8192}
        for kind in ("bf16", "fp8"):
            assert {
                j.seq_length for j in trains if j.model == size and kind in j.variant
            } == lengths
    assert {job.part for job in work} == set(PARTS)
    for name in CONFIGS:
        assert any(f"deepspeed_config=/{name}.json" in job.contestant for job in work), name


def test_parameters_of_the_sizes():
    """The sizes are what they are called, within 6 %."""
    import train
    from contestants.command import setting_of

    for model in SCALES["full"].models:
        setting = setting_of(train.parser().parse_args(model.shape.split()), "")
        llama = setting.architecture == "llama"
        hidden, inner = setting.hidden_size, setting.ffn_hidden_size
        kv = 2 * hidden * hidden * setting.kv_heads // setting.heads
        block = 2 * hidden**2 + kv + (3 if llama else 2) * hidden * inner
        count = setting.layers * block + setting.vocab_size * hidden * (2 if llama else 1)
        unit = {"M": 1e6, "B": 1e9}[model.name[-1]]
        assert count / unit == pytest.approx(float(model.name[:-1]), rel=0.06), model.name


def test_the_trainer_knows_all_flags(results):
    """Each variant's command line becomes a run; nothing is built."""
    import train
    from contestants.command import setting_of
    from contestants.ours import flags_of
    from contestants.registry import contestant, is_ours

    from megatron.training.run import parse_run

    work = jobs(SCALES["full"], ("sizes", "optimisations"), results.config)
    seen = {job.contestant: job for job in work if is_ours(job.contestant)}
    assert len(seen) > 15
    for name, known in seen.items():
        setting = setting_of(train.parser().parse_args(known.command[2:]), "")
        found = contestant(name)
        run = parse_run(None, flags_of(setting, found.stage, found.flags))
        assert (run.config.fast_paths.torch_compile == "on") == ("torch-compile" in name.split("+"))
        if "offload" in name:
            offload = run.content["zero_optimization"]["offload_optimizer"]
            assert offload["device"] == "cpu"


def test_done_measurements_are_not_made_again(results, tmp_path):
    counter = tmp_path / "count"
    code = f"open({str(counter)!r}, 'a').write('x'); " + WRITE
    work = [job("bf16", code), job("plain", code)]
    assert run(work, results)[::2] == (True, 2)
    assert run(work, results)[::2] == (True, 0)
    assert counter.read_text() == "xx"
    table = markdown(work, results)
    row = "| 8 | 500.0 | 1.000 | 12,346 | 57.1% | 60.2% | 72.50 | 10.8250 | 9.5000 |"
    assert f"| 1.3B | 2048 | bf16 {row}" in table and f"| 1.3B | 2048 | plain {row}" in table
    assert "NVIDIA H100, peak 989 TFLOP/s" in table and "2 of 2 measurements made" in table


def test_failures_become_rows_and_are_made_again_when_asked(results):
    broken = job("broken", "import sys; sys.exit('CUDA|error: no kernel')")
    slow = job("slow", "import time; time.sleep(60)", timeout=1.0)
    no_memory = FOUND | {"contestants": {"ours": {"rounds": [], "failed": "OutOfMemoryError: 7"}}}
    work = [broken, slow, job("large", found=no_memory), job("bf16")]
    assert run(work, results)[0]
    table = markdown(work, results)
    assert "| broken | exit status 1: CUDA/error: no kernel |" in table
    assert "| slow | not done within 1 s |" in table
    assert "| large | OutOfMemoryError: 7 |" in table
    assert "| bf16 | 8 | 500.0 |" in table
    results.forget_failures(work)
    assert [results.of(job) is None for job in work] == [True, True, True, False]


def test_time_limit_leaves_the_rest_to_the_next_run(results, monkeypatch):
    slow = job("slow", "import time; time.sleep(60)", timeout=900.0)
    done, said, _ = run([slow, job("bf16")], results, limit=59.0)
    assert not done and "the time limit is reached" in said[0]
    # Cut off while it runs: no failure, since with more time it might not have been one.
    monkeypatch.setattr(gpu_suite.run, "SHORTEST", 0.1)
    done, said, _ = run([slow], results, limit=1.0)
    assert not done and results.of(slow) is None and "cut off" in said[-1]


def test_a_killed_run_leaves_no_half_file(results):
    half = job("half", "import sys; open(sys.argv[-1], 'w').write('{'); sys.exit(1)")
    with pytest.raises(json.JSONDecodeError):
        run([half], results)
    assert results.of(half) is None


def test_dry_run_prints_commands(capsys, tmp_path):
    argv = ["--dry-run", "--results", str(tmp_path), "--parts", "optimisations,tests"]
    assert gpu.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "--contestants ours-zero1+torch-compile" in lines[0]
    assert "-m 'not proof'" in lines[-1] and lines[-1].startswith("tests: ")
    assert gpu.main(["--dry-run", "--results", str(tmp_path), "--parts", "speed"]) == 2
    assert "--parts speed: there are sizes" in capsys.readouterr().err
