"""What the documentation names exists: flags, files, links, tests; measurements have a command."""

import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from doc_commands import Command, commands
from doc_pages import COMMANDS, ROOT, pages, paths, read
from programs import PROGRAMS, Refused, flags_of, parse, parser_of

OTHERS = {
    "deepspeed": {
        *(
            "--hostfile",
            "--module",
            "--num_gpus",
            "--include",
            "--exclude",
            "--master_port",
            "--master_addr",
        ),
        *("--launcher", "--launcher_args", "--no_ssh", "--node_rank", "--venv_script"),
        *("--ssh_port", "--force_multi"),
    },
    "torchrun": {
        *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"),
        *("--max-restarts", "--rdzv-backend", "--rdzv-id", "--rdzv-endpoint", "--rdzv-conf"),
        "--local-addr",
    },
    "Megatron": {
        *("--ckpt-format", "--moe-layer-recompute", "--num-experts-switch"),
        *("--use-megatron-fsdp", "--use-torch-fsdp2", "--optimizer-cpu-offload"),
    },
    "torchtitan": {"--job", "--nproc_per_node"},
    "transformers": {
        *("--model_name_or_path", "--block_size", "--per_device_train_batch_size", "--optim"),
        *("--gradient_accumulation_steps", "--num_train_epochs", "--max_steps", "--warmup_ratio"),
        *("--lr_scheduler_type", "--gradient_checkpointing"),
    },
    "mpirun": {"--allow-run-as-root", "--mca"},
    "sbatch": {"--array", "--nodes", "--signal"},
    "docker": {"--build-arg", "--user", "--device"},
    "podman": {"--userns"},
    "apptainer": {"--nv"},
    "srun": {
        *("--container-image", "--container-mounts", "--container-workdir"),
        "--kill-on-bad-exit",
    },
    "nvidia-ctk": {"--output"},
    "nsys": {"--capture-range"},
    "pip": {"--index-url", "--no-deps", "--target"},
    "pytest": {"--log-cli-level", "--part", "--junitxml"},
    "sha256sum": {"--check"},
    "wikiextractor": {"--json"},
}
"""Flags of programs that are not of this project, as the pages use them."""

FOLDERS = (
    "megatron|tests|tools|compat|scripts|docker|benchmarks|docs|examples_deepspeed|"
    "deepspeed_configs"
)
_PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]")
_FLAG = re.compile(r"(?<![\w/-])--[a-zA-Z][\w-]*(?:\*|\.\.\.)?")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_MEASURED = re.compile(r"\|[^|]*\d ?(?:ms|s|MB|GB|MiB|GiB|CPU s|%)(?: \([^|]*\))? \|")
_COMMAND = re.compile(
    r"benchmarks/|tools/|tests/|pytest|make \w|examples_deepspeed/|pretrain_gpt.py"
)

ELSEWHERE = {"docs/distrib_optimizer.md", "benchmarks/results"}
"""Paths that are not of this repository, or that programs write."""

QUOTED = {"docs/evidence/conformance.md"}
"""Pages that quote the commands of other projects; tests/conformance runs those."""
OWN_WORDS = [path for path in paths() if path not in QUOTED]


def every_command() -> list[tuple[str, Command]]:
    return [
        (block.where, command)
        for page in pages()
        for block in page.blocks
        if block.language in COMMANDS and page.path != "tools/README.md"
        for command in commands(block)
    ]


COMMANDS_OF_OURS = [
    pytest.param(where, command, id=f"{where}-{number}")
    for number, (where, command) in enumerate(every_command())
    if command.program is not None and command.program.endswith(".py")
]


@pytest.mark.parametrize("where, command", COMMANDS_OF_OURS)
def test_flags_of_a_command(where, command):
    """The program's own parser takes the words of a command."""
    words = [word for word in command.words if word != "..."]
    if "--help" in words or "fails" in block_markers(where):
        return
    program = [command.program]
    if command.program == "tools/convert_checkpoint.py":
        program.append(words.pop(0))
    try:
        parsed = parse(program, words)
    except Refused as refused:
        pytest.fail(f"{where}: {command.text}\n{refused}")
    assert not parsed.unknown, f"{where}: {command.text}: {parsed.unknown}"


def block_markers(where):
    path, _, line = where.rpartition(":")
    return next(b.markers for b in read(path).blocks if b.line == int(line))


@cache
def known_flags() -> frozenset[str]:
    """Flags of all programs of the project, and of the others that pages name."""
    found = set().union(*OTHERS.values(), *(flags_of(program) for program in PROGRAMS))
    for file in sorted((ROOT / "benchmarks").glob("*.py")):
        if "ArgumentParser" in file.read_text() and "def main(" in file.read_text():
            found |= set(parser_of((f"benchmarks/{file.name}",))._option_string_actions)
    return frozenset(found)


@pytest.mark.parametrize("path", OWN_WORDS)
def test_flags_in_the_text(path):
    unknown = []
    for number, line in read(path).prose:
        for name in _FLAG.findall(re.sub(r"<!--.*?-->|\]\([^)]*\)", "", line)):
            start = name.rstrip("*.")
            if name == start:
                exists = name in known_flags()
            else:
                exists = any(flag.startswith(start) for flag in known_flags())
            if not exists:
                unknown.append(f"{path}:{number}: {name}")
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize("path", OWN_WORDS)
def test_paths(path):
    """Files and folders of the repository, also those that pages name from megatron/ on."""
    missing = []
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        if "<" in line and "megatron/" in line and ".py" not in line:
            continue
        names = [name for name in _PATH.findall(line) if not name.startswith(tuple(ELSEWHERE))]
        for quoted in re.findall(r"`([\w./*-]+\.py)`", line):
            if not re.match(rf"(?:{FOLDERS})/", quoted) and "/" in quoted:
                names.append(
                    next(
                        (
                            f"{f}/{quoted}"
                            for f in FOLDERS.split("|")
                            if (ROOT / f / quoted).is_file()
                        ),
                        quoted,
                    )
                )
            elif quoted.startswith("test_") and not list((ROOT / "tests").rglob(quoted)):
                missing.append(f"{path}:{number}: {quoted}")
        for name in names:
            if not list(ROOT.glob(name.rstrip("/"))) and "<" not in line:
                missing.append(f"{path}:{number}: {name}")
    assert not missing, "\n".join(missing)


@cache
def identifiers() -> frozenset[str]:
    """All words of the sources."""
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


@pytest.mark.parametrize("path", [p for p in paths() if "design" in p or p == "CONTRIBUTING.md"])
def test_names_of_the_code(path):
    """Classes, functions and fields that the pages on the code name."""
    missing = []
    for number, line in read(path).prose:
        if line.startswith("| dtype"):  # words that are not to be used
            continue
        for quoted in re.findall(r"`([A-Za-z_]\w*)[`(]", line):
            is_name = "_" in quoted or re.search(r"[a-z][A-Z]", quoted) or quoted.isupper()
            if is_name and quoted.strip("*") not in identifiers():
                missing.append(f"{path}:{number}: {quoted}")
    assert not missing, "\n".join(missing)


def test_pages_that_the_code_names():
    """docs/... in docstrings, help texts and messages."""
    missing = []
    for folder in ("megatron", "tools", "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"(?<![\w/.])docs/[\w/-]+\.(?:md|png)", file.read_text()):
                if name not in ELSEWHERE and not (ROOT / name).is_file():
                    missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)


def slug(heading: str) -> str:
    """The anchor of a heading."""
    text = re.sub(r"[^\w\s-]", "", heading.strip().lower())
    return re.sub(r"\s", "-", text)


@cache
def anchors(path: Path) -> frozenset[str]:
    lines = path.read_text().splitlines()
    found = [slug(line.lstrip("#")) for line in lines if line.startswith("#")]
    return frozenset([*found, *(re.sub(r"-+", "-", name) for name in found)])


@pytest.mark.parametrize("path", paths())
def test_links(path):
    """Files and headings in the repository; of other addresses only the form."""
    broken = []
    for number, line in read(path).prose:
        for target in _LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                if not re.fullmatch(r"https?://[\w.-]+\.[a-z]+(/[^\s]*)?", target):
                    broken.append(f"{path}:{number}: {target}")
                continue
            file, _, anchor = target.partition("#")
            found = (ROOT / path).parent / file if file else ROOT / path
            if not found.exists() or (anchor and anchor not in anchors(found)):
                broken.append(f"{path}:{number}: {target}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("path", paths())
def test_tests_that_pages_name(path):
    """``pytest FILE -k WORD``: the file has a test with that word."""
    missing = []
    text = re.sub(r"\\\n\s*", "", (ROOT / path).read_text())
    for command in re.findall(r"pytest [^`\n]*", text):
        words = shlex.split(command.split("#")[0].replace("'", '"'), comments=True)
        files = [word for word in words if word.startswith("tests/")]
        if "-k" in words and files:
            text = "".join(
                file.read_text()
                for name in files
                for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
            )
            if words[words.index("-k") + 1].strip(")") not in text:
                missing.append(f"{path}: {command}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("path", OWN_WORDS)
def test_tests_in_tables(path):
    """Files in a column "test" exist, and so do tests (`file.py::test_it`) of them; a file without
    a folder is next to the one before it."""
    missing, column = [], None
    for number, line in read(path).prose:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if not line.startswith("|"):
            column = None
        elif column is None:
            column = cells.index("test") if "test" in cells else 0
        elif column:
            folder = ROOT / "no folder"
            for name in re.findall(r"`([^`]+)`", cells[column]):
                name, _, test = name.partition("::")
                file = ROOT / name if "/" in name else folder / name
                folder = file.parent
                if not file.exists() or (test and f"def {test}(" not in file.read_text()):
                    missing.append(f"{path}:{number}: {name}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("path", [p for p in paths() if p.startswith("docs/") or p == "README.md"])
def test_measurements_have_a_command(path):
    """A section with a table of times, sizes or shares names the command that measures them."""
    text = (ROOT / path).read_text()
    without = []
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        if _MEASURED.search(section) and not _COMMAND.search(section):
            without.append(section.splitlines()[0])
    assert not without, f"{path}: {without}"


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("path", paths())
def test_no_block_without_a_fence(path):
    """Indented blocks would not be seen by these tests."""
    before, in_list = "", False
    for number, line in read(path).prose:
        if line.strip():
            in_list = in_list and line.startswith(" ") or bool(re.match(r" *([-*]|\d+\.) ", line))
        indented = line.startswith("    ") and not before.strip() and not in_list
        assert not indented, f"{path}:{number}: {line}"
        before = line


def test_what_is_missing_is_noticed(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\nUse `--no-such-flag` with `megatron/no_such_file.py`, see [there](no.md), "
        "[here](#nothing).\n\n| a | 3 ms |\n|---|---|\n| b | 4 ms |\n\n"
        "## Tests\n\n| what | test |\n|---|---|\n"
        "| x < y | `tests/docs/test_claims.py`, `test_words.py` |\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setattr("doc_pages.ROOT", tmp_path)
    known = importlib.util.find_spec("programs")
    assert known is not None
    for test in (
        test_flags_in_the_text, test_paths, test_links, test_tests_in_tables,
        test_measurements_have_a_command,
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            test("page.md")
