"""benchmarks/gpu.py: how it spends the time, and that what is done stays done."""

import dataclasses
import json
import random
import tarfile

import gpu
import gpu_suite.results
import pytest
from gpu_suite import processes, schedule
from gpu_suite.compare import departures
from gpu_suite.ladder import ABLATIONS, MAIN, SCALES, TESTS, Cell, cells
from gpu_suite.processes import OutOfTime, Sampler, WorkerDied, busiest
from gpu_suite.results import Results, failure, merged, read_bundle
from gpu_suite.schedule import Suite, next_cell
from gpu_suite.table import markdown, refresh, report

MACHINE = {
    "device": "NVIDIA H100", "peak_flops": 989e12, "peak_is": "data sheet", "cores": 16,
    "torch": "2.11", "cuda": "13.0", "deepspeed": "0.19.8", "python": "3.12",
    "memory_bytes": 85e9,
}  # fmt: skip
PLAIN, OTHER = Cell(MAIN, "tiny", "bf16", "ours-zero1"), Cell(MAIN, "tiny", "x", "ours-zero2")
LARGE = Cell(MAIN, "1.3B", "bf16", "ours-zero1")


def found(cell: Cell, date: str = "2026-11-22 10:00:00", **more) -> dict:
    """A result as the suite keeps it: rounds of 2, 4 and 4 s for two steps each."""
    losses = [6.25, 6.2, 6.1, 6.05, 6.0, 5.9]
    return {
        "cell": dataclasses.asdict(cell), "machine": MACHINE, "date": date, "seconds": 30.0,
        "setting": dataclasses.asdict(cell.setting) if cell.shape else {},
        "rounds": [_round(1.0), _round(2.0), _round(2.0)],
        "losses": losses, "grad_norms": [2.0] * 6, "gpu": {}, "command": "pretrain_gpt.py --x",
        **more,
    }  # fmt: skip


def _round(seconds: float) -> dict:
    clocks = dict.fromkeys(("gpu_seconds", "cpu_seconds", "wall_seconds"), 2 * seconds)
    return clocks | {"peak_bytes": 7.25e10}


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results")


class Script:
    """A worker that takes what a test says for each cell: an answer, or an error to raise."""

    def __init__(self, monkeypatch, **answers) -> None:
        self.answers, self.asked, self.started, self.closed = answers, [], 0, 0
        monkeypatch.setattr(schedule, "Worker", self)
        monkeypatch.setattr(Sampler, "__enter__", lambda sampler: sampler)
        monkeypatch.setattr(Sampler, "__exit__", lambda sampler, *_: None)
        monkeypatch.setattr(Sampler, "found", {"clocks.sm": 1755.0, "power.draw": 690.0}, False)

    def __call__(self, log, cache, timeout):
        self.started += 1
        self.machine = MACHINE
        return self

    def ask(self, request: str, timeout: float) -> dict:
        cell = Cell(**json.loads(request)["cell"])
        self.asked.append(cell.variant)
        answer = self.answers.get(cell.variant, {})
        if isinstance(answer, Exception):
            raise answer
        kept = ("setting", "rounds", "losses", "grad_norms", "command")
        return {k: v for k, v in found(cell).items() if k in kept} | answer

    def said(self) -> list[str]:
        return ["a line of the log"]

    def close(self) -> None:
        self.closed += 1


def run(results, work, limit=None) -> tuple[bool, list[str]]:
    said: list[str] = []
    return Suite(results, said.append, lambda: None, limit).run(work), said


def test_the_first_that_fits_is_next(results):
    """40 s of start, and 1.3B's steps."""
    work = [LARGE, PLAIN, OTHER]
    assert next_cell(work, results, 989e12, 1000)[0] == LARGE
    assert next_cell(work, results, 989e12, 50)[0] == PLAIN
    assert next_cell(work, results, 989e12, 30) is None
    # A slower device needs longer for it.
    assert next_cell(work, results, 98.9e12, 100)[0] == PLAIN
    results.put(PLAIN.name, found(PLAIN))
    assert next_cell(work, results, 989e12, 50)[0] == OTHER


def test_what_was_cut_off_needs_more_time_and_twice_comes_last(results):
    work = [LARGE, PLAIN]
    results.begin(LARGE.name)
    results.cut_off(LARGE.name, 300.0)
    assert next_cell(work, results, 989e12, 350)[0] == PLAIN
    assert next_cell(work, results, 989e12, 361) == (LARGE, 360.0)
    results.begin(LARGE.name)  # and the whole suite was killed
    assert results.begun == {LARGE.name: [300.0, 0.0]}
    assert next_cell(work, Results(results.folder), 989e12, 1000)[0] == PLAIN
    results.put(PLAIN.name, found(PLAIN))
    assert next_cell(work, results, 989e12, 1000)[0] == LARGE


def test_estimates_follow_what_was_measured(results):
    """Two of a group and shape: the third takes as long as the slower, and a fifth more."""
    work = [Cell(ABLATIONS, "1.3B", name, "ours-zero1") for name in "abc"]
    assert next_cell(work, results, 989e12, 1000)[1] > 60
    for cell, seconds in zip(work, (20.0, 30.0), strict=False):
        results.put(cell.name, found(cell, seconds=seconds))
    assert next_cell(work, results, 989e12, 40) == (work[2], 36.0)


def test_done_cells_are_not_measured_again(results, monkeypatch):
    worker = Script(monkeypatch)
    assert run(results, [PLAIN, OTHER])[0]
    assert run(results, [PLAIN, OTHER])[0]
    # One process for both; it is started again to see that the machine is the same.
    assert worker.asked == ["bf16", "x"] and worker.started == worker.closed == 2
    kept = results.of(PLAIN.name)
    assert kept["machine"] == MACHINE and kept["log"] == ["a line of the log"]
    assert results.begun == {}
    row = "| 256 | 4 x 32 | 2,000.0 | 1.000 | 128 |"
    assert f"| tiny | 32 | bf16 {row}" in markdown(results.all())
    assert "| 72.50 | 1755, 690 | 6.2500 | 5.9000 |" in markdown(results.all())


def test_failures_are_rows_and_are_made_again_when_asked(results, monkeypatch):
    names = ["dies", "slow", "memory", "fp8", "large", "gone", "bf16"]
    work = [Cell(MAIN, "tiny", name, "ours-zero1") for name in names]
    worker = Script(
        monkeypatch,
        dies=WorkerDied("exit status -11: CUDA|error"), slow=OutOfTime(),
        memory={"failed": "out of memory: tried to allocate", "restart": True},
        fp8={"failed": "exit status 2: unknown flag"}, large={"cannot_fit": "predicted 108 GB"},
        gone={"missing": "transformers not installed", "left_bytes": 9e9},
    )  # fmt: skip
    assert run(results, work)[0]
    # What was too slow for its estimate is tried again after the others.
    assert worker.asked == [*names, "slow"]
    # After those that died, ran out of time, wanted it or left 9 GB behind.
    assert worker.started == 5
    table = markdown(results.all())
    for name, why in (
        ("dies", "exit status -11: CUDA/error"), ("slow", "not done within 300 s"),
        ("memory", "out of memory: tried to allocate"), ("large", "predicted 108 GB"),
        ("fp8", "exit status 2: unknown flag"), ("gone", "transformers not installed"),
    ):  # fmt: skip
        assert f"| {name} | {why} |" in table
    results.forget_failures()
    assert list(results.all()) == ["main-tiny-bf16"]


def test_the_time_limit_leaves_the_rest_to_the_next_run(results, monkeypatch):
    worker = Script(monkeypatch, bf16=OutOfTime())
    done, said = run(results, [LARGE, PLAIN], limit=50)
    assert not done and "cut off after" in said[1] and said[-1].startswith("left to the next run")
    # It could have taken longer with more time, so that this is no failure.
    assert worker.asked == ["bf16"] and results.of(PLAIN.name) is None
    (given,) = Results(results.folder).begun[PLAIN.name]
    assert 45 < given <= 50


@pytest.mark.proof
def test_tests_that_are_cut_off_say_what_failed_and_run_again(results, monkeypatch, tmp_path):
    """Those of a folder that stands for tests/gpu: one passes, one fails, one never ends."""
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "test_x.py").write_text(
        "import time\n\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): time.sleep(60)\n"
    )
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts in half a second
    cell = Cell(TESTS, variant="x", fixed=1)
    Script(monkeypatch)
    done, said = run(results, [cell], limit=6)
    kept = results.of(cell.name)
    assert not done and "left to the next run: tests-x" in said[-1]
    assert kept["summary"] == "1 passed, 1 failed"
    assert kept["broken"] == ["FAILED tests/gpu/test_x.py::test_b"]
    assert any("test_c" in line for line in kept["log"]) and kept["failed"].startswith("not done")
    assert len(Results(results.folder).begun[cell.name]) == 1
    assert "  - FAILED tests/gpu/test_x.py::test_b" in markdown(results.all())
    (folder / "test_x.py").write_text("def test_a(): pass\n")
    assert run(results, [cell])[0] and results.begun == {}
    assert "1 passed" in results.of(cell.name)["summary"] and not failure(results.of(cell.name))


def test_peers_have_a_process_of_their_own(results, monkeypatch):
    worker = Script(monkeypatch)
    peer = Cell(MAIN, "tiny", "peer", "plain")
    eager = Cell(MAIN, "tiny", "eager", "ours-zero1+attention-backend=eager")
    assert run(results, [PLAIN, peer, eager, OTHER])[0]
    assert worker.started == 4 and worker.asked == ["bf16", "peer", "eager", "x"]


def test_results_of_another_device_are_refused(results, monkeypatch, capsys):
    Script(monkeypatch)
    other = {**MACHINE, "device": "NVIDIA H200"}
    results.put("main-tiny-y", found(PLAIN, machine=other))
    with pytest.raises(ValueError, match="has results of NVIDIA H200, this is NVIDIA H100"):
        run(results, [PLAIN])


def test_a_bundle_continues_elsewhere(results, tmp_path):
    results.put(PLAIN.name, found(PLAIN))
    results.begin(OTHER.name)
    results.cut_off(OTHER.name, 100.0)
    results.trace(PLAIN.name).write_bytes(b"trace")
    (results.folder / "cache" / "kernel").write_bytes(b"code")
    (results.folder / "worker.log").write_text("long")
    bundle = tmp_path / "gpu.tgz"
    results.pack(bundle)
    elsewhere = Results(tmp_path / "elsewhere")
    elsewhere.unpack(bundle)
    assert elsewhere.all() == results.all() and elsewhere.begun == {OTHER.name: [100.0]}
    assert elsewhere.trace(PLAIN.name).read_bytes() == b"trace"
    assert (elsewhere.folder / "cache" / "kernel").exists()
    assert not (elsewhere.folder / "worker.log").exists()


def test_a_bundle_stays_small(results, tmp_path, monkeypatch):
    """Traces as far as there is room, the smallest first; the results always."""
    results.put(PLAIN.name, found(PLAIN))
    for name, size in (("a", 2048), ("b", 100)):
        results.trace(name).write_bytes(random.Random(1).randbytes(size))
    monkeypatch.setattr(gpu_suite.results, "BUNDLE_BYTES", 1500)
    results.pack(tmp_path / "gpu.tgz")
    with tarfile.open(tmp_path / "gpu.tgz") as file:
        assert "traces/b.json.gz" in file.getnames() and "traces/a.json.gz" not in file.getnames()
    assert list(read_bundle(tmp_path / "gpu.tgz")) == [PLAIN.name]


def test_a_bundle_cannot_write_elsewhere(results, tmp_path):
    bundle = tmp_path / "evil.tgz"
    bundle.write_bytes(gpu_suite.results.packed({"../outside": b"x", "cells/a.json": b"{}"}))
    results.unpack(bundle)
    assert not (tmp_path / "outside").exists()
    assert (results.folder / "cells" / "a.json").exists()


@pytest.mark.parametrize("content", [b"no archive", b"", None, "cut", "no json"])
def test_what_is_no_bundle_is_refused_by_name(tmp_path, monkeypatch, capsys, content):
    """Before anything starts; a file that is not there is no error of --bundle."""
    monkeypatch.setattr(gpu, "_has_gpu", lambda: True)
    monkeypatch.setattr(schedule, "Worker", lambda *_: pytest.fail("started"))
    bundle = tmp_path / "notes.txt"
    whole = gpu_suite.results.packed({"cells/a.json": b"{"})
    if content is None:
        bundle.mkdir()
    else:
        bundle.write_bytes(
            {"cut": whole[: len(whole) // 2], "no json": whole}.get(content, content)
        )
    commands = [["--merge", str(bundle)]]
    if content != "no json":  # which --bundle sees when it reads that cell
        commands.append(["--bundle", str(bundle), "--results", str(tmp_path / "results")])
    for argv in commands:
        assert gpu.main(argv) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"gpu.py: error: {bundle}: ") and said.count("\n") == 1
        assert "expected a file that --bundle wrote" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--time-limit -1", "--time-limit -1: expected minutes, more than 0"),
        ("--time-limit 0", "--time-limit 0: expected minutes"),
        ("--into RESULTS.md", "--into RESULTS.md is for the tables of --merge"),
        ("--groups main --cells main-1.3B-fp8", "--groups and --cells both select"),
    ],
)
def test_flags_that_contradict_each_other(capsys, flags, said):
    with pytest.raises(SystemExit, match="2"):
        gpu.main(flags.split())
    assert said in capsys.readouterr().err


def test_merging_takes_the_best_and_the_newest():
    old, new = found(PLAIN), found(PLAIN, date="2026-11-23 09:00:00")
    broken = found(PLAIN, date="2026-11-24 09:00:00", failed="no luck")
    other = found(PLAIN, machine={**MACHINE, "device": "NVIDIA H200"})
    name = PLAIN.name
    devices = merged([{name: new}, {name: old}, {name: broken}, {name: other}])
    assert devices == {"NVIDIA H100": {name: new}, "NVIDIA H200": {name: other}}
    assert merged([{name: broken}, {name: old}])["NVIDIA H100"][name] is old
    assert failure(broken) == "no luck"


def test_merge_prints_and_owns_one_section(results, tmp_path, capsys):
    results.put(PLAIN.name, found(PLAIN))
    bundle, page = tmp_path / "gpu.tgz", tmp_path / "RESULTS.md"
    results.pack(bundle)
    page.write_text("# Results\n\nabove\n")
    assert gpu.main(["--merge", str(bundle), "--into", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## On GPUs\n\n### NVIDIA H100\n")
    assert printed in page.read_text()
    page.write_text(page.read_text() + "\n## Below\n")
    refresh(page, "## On GPUs\n\nnew\n")
    text = page.read_text()
    assert text.startswith("# Results\n\nabove\n\n<!--") and text.endswith("\n\n## Below\n")
    assert "new" in text and "NVIDIA" not in text
    assert gpu.main(["--merge", str(page)]) == 2
    assert "RESULTS.md: " in capsys.readouterr().err


def test_losses_out_of_the_band_have_no_speed():
    fp8 = Cell(MAIN, "tiny", "fp8", "ours-zero1+fp8-format=hybrid")
    base = found(PLAIN)
    far = [loss * 1.02 for loss in base["losses"]]
    kept = {
        PLAIN.name: base,
        OTHER.name: found(OTHER, losses=far),
        fp8.name: found(fp8, losses=far),
    }
    odd = departures(kept)
    assert odd == {OTHER.name: "loss at step 1 is 6.3750, not 6.2500 ± 1%"}
    table = markdown(kept)
    assert f"| tiny | 32 | x | {odd[OTHER.name]} |" in table
    assert "| tiny | 32 | fp8 | 256 |" in table
    for worse in ({"losses": [float("nan")]}, {"losses": [loss * 1.05 for loss in far]}):
        assert fp8.name in departures({**kept, fp8.name: found(fp8, **worse)})
    wrong = found(OTHER, grad_norms=[2.2])
    said = departures({PLAIN.name: base, OTHER.name: wrong})[OTHER.name]
    assert said == "first gradients' norm is 2.2, not 2 ± 5%"
    # Other shapes and lengths are not compared, nor what failed.
    longer = Cell(MAIN, "tiny", "x", "ours-zero1", seq_length=64)
    broken = found(OTHER, failed="no")
    assert not departures({PLAIN.name: base, longer.name: found(longer, losses=far), "b": broken})


def test_rates_next_to_the_ceilings():
    """1.3B in bf16 at 1 s a step, where square products reach 800 TFLOP/s and fp8's 1,500."""
    ceilings = {
        "copy_bytes_per_second": 2.9e12, "square": {"bf16": 800e12, "fp8": 1500e12},
        "products": {"1.3B": {"rows": [["qkv", "output", 16384, 6144, 2048, 7e14, None]],
                              "step_seconds": {"bf16": 0.5, "fp8": 0.3}}},
        "attention": {"1.3B": {"shape": [8, 16, 16, 2048, 128], "flash": "no kernel",
                               "chosen": {"forward": 4e14, "both": 3e14}}},
    }  # fmt: skip
    fp8 = Cell(MAIN, "1.3B", "fp8", "ours-zero1+fp8-format=hybrid")
    blocks = "ours-zero1+recompute-granularity=full+recompute-method=uniform"
    again = Cell(MAIN, "1.3B", "again", blocks)
    second = [{**_round(2.5), "peak_bytes": 4e10}]
    kept = {
        "ceilings": {**found(Cell("ceilings")), **ceilings},
        LARGE.name: found(LARGE, rounds=second),
        again.name: found(again, rounds=second),
        fp8.name: found(fp8, rounds=second, halved="no memory", trace={"table": "the table"}),
    }
    text = markdown(kept)
    assert "Copy: 2.9 TB/s" in text and "800 TFLOP/s in bf16, 1,500 in fp8" in text
    assert "| 1.3B | qkv, output | 16384 | 6144 | 2048 | 700 |  |" in text
    assert "| 1.3B | 500.0 | 300.0 | 109.8% |" in text
    assert "| 1.3B [8, 16, 16, 2048, 128] | flash | no kernel |  |" in text
    # 65,536 tokens of 8.283 GFLOP, with half of the scores: 542.8 TFLOP.
    assert "| 1.3B | 2048 | bf16 | 65,536 | 8 x 2,048 | 1,000.0 | 1.000 | 65,536 | 542.8 |" in text
    assert "| 54.9% | 58.9% |  | 67.9% | 40.00 |" in text
    # The blocks once more, a third of 542.8 - 25.8 TFLOP: HFU is 72.3%.
    assert "| 54.9% | 58.9% | 72.3% | 67.9% | 40.00 |" in text
    assert "8 x 2,048 (halved: out of memory)" in text and "| 36.2% |" in text
    assert "Where the time goes: main-1.3B-fp8\n\n```text\nthe table\n```" in text
    assert "main-1.3B-bf16: pretrain_gpt.py --x" in text
    assert "On GPUs" in report({"NVIDIA H100": kept})


def test_clocks_are_those_of_the_steps():
    lines = ["345, 1593, 80, 30", *["1755, 2619, 690, 60"] * 2, "[N/A], 1, 2, 3", "345, 1, 70, 30"]
    busy = busiest(Sampler.FIELDS, "\n".join(lines))
    assert busy["clocks.sm"] == 1755 and busy["power.draw"] == 690
    assert busiest(Sampler.FIELDS, "") == {}


def test_a_dry_run_prints_cells(capsys):
    assert gpu.main(["--dry-run", "--groups", "graphs,ablations"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "graphs: , about 20 s"
    assert lines[1].startswith("ablations-1.3B-all-of-it: ours-zero1+torch-compile, about ")
    assert gpu.main(["--dry-run", "--cells", "main-1.3B-fp8"]) == 0
    assert capsys.readouterr().out.startswith("main-1.3B-fp8: ")
    for flags in (["--groups", "speed"], ["--cells", "main-9B"]):
        assert gpu.main(["--dry-run", *flags]) == 2
        assert f"{' '.join(flags)}: there are " in capsys.readouterr().err
    assert set(SCALES) == {"full", "tiny"} and len(cells("tiny")) > 10
