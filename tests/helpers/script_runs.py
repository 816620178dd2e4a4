"""Run the scripts under Megatron-DeepSpeed's names at small size.

    python tests/helpers/script_runs.py NAME ...  # the rows whose path has one of the names

``--markdown`` also writes their results to the page, and keeps those of other rows.

They read the folder of public data in MEGATRON_TEST_DATA.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples_deepspeed"
PAGE = ROOT / "docs" / "reference" / "megatron-deepspeed.md"
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
BATCHES = "--global-batch-size 8 --micro-batch-size 2 --log-interval 1 --eval-iters 1"
SMALL = f"{MODEL} --max-position-embeddings 32 {BATCHES}"
TOKENS = "--train-tokens 2560 --lr-decay-tokens 2560 --lr-warmup-tokens 512"
"""Ten steps of eight samples of 32 tokens."""
STEPS, STOP = 10, 5
COMPARED = re.compile(r"([a-z ]*(?:loss|rate|norm|scale|seqlen|samples|tokens)): +([\d.E+-]+) \|")


@dataclass(frozen=True)
class Script:
    """A row: how a script is started small, and what it has to show."""

    path: str
    """Under examples_deepspeed/."""
    kind: str
    """``train`` (ten steps, and five and five, with equal losses), ``run`` (one run, which prints
    what ``prints`` says) or ``serve`` (a server, which answers)."""
    processes: int = 8
    """Number of processes of the command at full size."""
    words: str = ""
    """Positions; {data}, {out} and the names of ``Data`` are replaced here and below. {out} is the
    folder of one run, {base} that of the row, where ``before`` has run."""
    small: str = SMALL
    settings: dict[str, str] = field(default_factory=dict)
    gpus: int = 1
    family: str = "gpt"
    before: tuple[str, ...] = ()
    """Shell lines that make what the script starts from."""
    prints: tuple[str, ...] = ()
    continues: float | None = None
    """Largest relative difference of its losses, with another layout, to those of the first line
    of ``before``, which trained on where this script begins."""
    cwd: str = ""
    leaves: tuple[str, ...] = ()
    """Files that the script leaves in ``cwd``."""
    note: str = ""


@dataclass(frozen=True)
class Data:
    """Small corpora made of the public data, by the names that rows use."""

    names: dict[str, str]

    @classmethod
    def of(cls, source: Path, folder: Path) -> Data:
        names = {
            "source": str(source),
            "gpt": f"{folder}/gpt_text_document",
            "bert": f"{folder}/bert_text_sentence",
            "titles": f"{folder}/bert_title_sentence",
            "vocab": f"{source}/gpt2_bpe/gpt2-vocab.json",
            "merges": f"{source}/gpt2_bpe/gpt2-merges.txt",
            "wordpieces": f"{source}/bert_wordpiece/bert-base-uncased-vocab.txt",
            "data": str(folder),
        }
        web = (source / "openwebtext" / "openwebtext-1000.decoded.jsonl").read_text()
        texts = [json.loads(line)["text"] for line in web.splitlines()[:100]]
        rows = [{"text": text, "title": " ".join(text.split()[:6])} for text in texts]
        (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = ["python", "tools/preprocess_data.py", "--input", f"{folder}/text.jsonl"]
        gpt = ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--vocab-file"]
        gpt += [names["vocab"], "--merge-file", names["merges"], "--output-prefix", f"{folder}/gpt"]
        bert = ["--tokenizer-type", "BertWordPieceLowerCase", "--split-sentences", "--vocab-file"]
        bert = ["--json-keys", "text", "title", *bert]
        bert += [names["wordpieces"], "--output-prefix", f"{folder}/bert"]
        for flags in (gpt, bert):
            finish([*made, *flags, "--workers", "1"], {})
        for task in ("MNLI", "QQP"):
            (folder / task).mkdir()
            for file in (source / "glue" / task).glob("*.tsv"):
                rows = file.read_text().splitlines()[:65]
                (folder / task / file.name).write_text("\n".join(rows) + "\n")
        return cls(names)

    def settings(self, family: str) -> dict[str, str]:
        if family == "bert":
            return {"DATA_PATH": self.names["bert"], "VOCAB_FILE": self.names["wordpieces"]}
        pair = {"VOCAB_FILE": self.names["vocab"], "MERGE_FILE": self.names["merges"]}
        return {"DATA_PATH": self.names["gpt"]} | pair

    def fill(self, text: str, out: Path) -> str:
        base = out.parent if out.name in ("whole", "parts") else out
        return text.format(**self.names, out=out, base=base)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(settings: dict[str, str]) -> dict[str, str]:
    apart = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DRY_RUN")
    kept = {name: value for name, value in os.environ.items() if name not in apart}
    port = free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "MASTER_PORT": port, "DEEPSPEED_FLAGS": f"--master_port {port}"}
    return kept | own | {"OMP_NUM_THREADS": "1"} | settings


def finish(command: list[str], settings: dict[str, str], cwd: Path | str = ROOT) -> str:
    """Return what a command prints on both streams; it has to succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(settings),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-6000:]}"
    return done.stdout


def start(row: Script, data: Data, out: Path, *flags: str, **more: str) -> str:
    command, settings = prepared(row, data, out, *flags, **more)
    said = finish(command, settings, data.fill(row.cwd, out) or ROOT)
    for name in row.leaves:
        assert Path(data.fill(row.cwd, out), name).stat().st_size, said
    return said


def prepared(
    row: Script, data: Data, out: Path, *flags: str, **more: str
) -> tuple[list[str], dict[str, str]]:
    """The command of a row and its settings."""
    settings = data.settings(row.family) | {"OUTPUT_BASEPATH": str(out), "NUM_GPUS": str(row.gpus)}
    settings |= {"GPUS": str(row.gpus), "CHECKPOINT_PATH": f"{out}/checkpoint/run"} | more
    settings |= {name: data.fill(value, out) for name, value in row.settings.items()}
    words = [data.fill(word, out) for word in shlex.split(f"{row.words} {row.small}")]
    return ["bash", str(FOLDER / row.path), *words, *flags], settings


def serve(row: Script, data: Data, out: Path) -> str:
    """Start a server, ask it once, end it; return its answer in words."""
    port = free_port()
    command, settings = prepared(row, data, out, "--port", port)
    body = json.dumps({"prompts": ["They saw"], "tokens_to_generate": 4}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api", body, {"Content-Type": "application/json"}, method="PUT"
    )
    with open(out / "server.log", "w") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment(settings), stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            for _ in range(300):
                assert server.poll() is None, (out / "server.log").read_text()[-4000:]
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        text = json.load(answer)["text"][0]
                    break
                except (ConnectionError, urllib.error.URLError):
                    time.sleep(1)
            assert text.startswith("They saw"), text
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(timeout=120)
    return "answers `PUT /api`"


def steps(printed: str) -> dict[int, dict[str, str]]:
    """The numbers of each step that do not depend on the clock."""
    lines = (line for line in printed.splitlines() if re.search(r" iteration +\d+/", line))
    numbers = {}
    for line in lines:
        values = {name.strip(): value for name, value in COMPARED.findall(line)}
        numbers[int(re.search(r" iteration +(\d+)/", line)[1])] = values
    return numbers


def run(row: Script, data: Data, out: Path) -> str:
    """Run a row; return its result in words."""
    settings = data.settings(row.family) | {"GPUS": "1", "NUM_GPUS": "1"}
    earlier = [finish(["bash", "-c", data.fill(line, out)], settings) for line in row.before]
    if row.kind == "serve":
        return serve(row, data, out)
    if row.kind == "run":
        said = start(row, data, out)
        texts = [match(pattern, said).replace("|", " ") for pattern in row.prints]
        if row.continues is not None:
            texts.append(follows(steps(earlier[0]), steps(said), row.continues))
        return "; ".join(" ".join(text.split()) for text in texts)
    whole = start(row, data, out / "whole")
    for pattern in row.prints:
        match(pattern, whole)
    expected = steps(whole)
    assert max(expected) == STEPS, whole[-3000:]
    # Another launcher starts faster and trains the same.
    again = {"LAUNCHER": "torchrun"}
    first = steps(start(row, data, out / "parts", "--exit-interval", str(STOP), **again))
    second = steps(start(row, data, out / "parts", **again))
    assert max(first) == STOP and first == {step: expected[step] for step in first}
    rest = {step: numbers for step, numbers in expected.items() if step > STOP}
    assert second == rest, f"{second}\n{rest}"
    loss = [next(v for n, v in expected[step].items() if n.endswith("loss")) for step in (1, STEPS)]
    return (
        f"10 steps, loss {float(loss[0]):.3f} to {float(loss[1]):.3f}; resumed from step 5: equal"
    )


def follows(unbroken: dict[int, dict], resumed: dict[int, dict], tolerance: float) -> str:
    """Compare losses from the middle of a run on with those of a run in one piece."""
    assert list(resumed) == list(range(STOP + 1, STEPS + 1)), resumed
    largest = 0.0
    for step, numbers in resumed.items():
        losses = {name: float(value) for name, value in numbers.items() if name.endswith("loss")}
        assert losses, numbers
        for name, loss in losses.items():
            before = float(unbroken[step][name])
            assert math.isclose(loss, before, rel_tol=tolerance), f"{resumed}\n{unbroken}"
            largest = max(largest, abs(loss / before - 1))
    return f"steps {STOP + 1} to {STEPS} as without a stop, to {largest:.0e}"


def match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in\n{text[-4000:]}"
    return match[0]


def rows() -> tuple[Script, ...]:
    from script_rows import ROWS
    from script_rows_megatron import ROWS as OTHERS

    return ROWS + OTHERS


MARK = "<!-- The tables are written by tests/helpers/script_runs.py. -->\n"


def page(results: dict[str, str]) -> str:
    parts, folder = [PAGE.read_text().split(MARK)[0] + MARK], None
    for row in rows():
        name = Path(row.path)
        if name.parent != folder:
            folder = name.parent
            parts += [
                f"\n## `examples_deepspeed/{folder}`\n"
                if folder.name
                else "\n## The folder itself\n"
            ]
            parts += ["| script | processes | result at small size | notes |", "|---|---|---|---|"]
        result = results.get(row.path, "not run")
        parts.append(f"| `{name.name}` | {row.processes} | {result} | {row.note} |")
    return "\n".join(parts) + "\n"


def kept_results() -> dict[str, str]:
    results, folder = {}, ""
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            folder = (
                f"{line.split('`')[1].removeprefix('examples_deepspeed/')}/" if "`" in line else ""
            )
        elif line.startswith("| `"):
            cells = line.split(" | ")
            results[folder + cells[0].split("`")[1]] = cells[2]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--markdown", action="store_true")
    own = parser.parse_args()
    results = kept_results()
    source = Path(os.environ["MEGATRON_TEST_DATA"])
    with tempfile.TemporaryDirectory() as folder:
        data = None
        for row in rows():
            if not any(name in row.path for name in own.names):
                continue
            data = data or Data.of(source, Path(folder))
            out = Path(folder, "out", row.path)
            out.mkdir(parents=True)
            try:
                results[row.path] = run(row, data, out)
                print(row.path, results[row.path], sep=": ", flush=True)
            except AssertionError as error:
                print(f"{row.path}: FAILED\n{error}", flush=True)
    if own.markdown:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
