"""Installs a wheel into an empty environment, and uses it in a folder without the checkout:

    python release/try_wheel.py dist/*.whl
    python release/try_wheel.py dist/*.whl --extras            # also resolves every extra
    python release/try_wheel.py dist/*.whl --packages FOLDER   # without an index

Every command shows its help, modules start by `python -m`, a shell completes flags, types and
licences are there; then the quickstart trains, resumes and exports, and the fine-tuning makes a
model from that export which transformers reads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from importlib.metadata import PathDistribution
from pathlib import Path

NAME = "megatron-deepspeed"
MODULES = ("pretrain_gpt", "finetune", "megatron.tools.plan", "megatron.tools.openwebtext.add_id")
"""Programs that are started by ``python -m``."""

CHATS = [
    {"prompt": f"def number_{number}():", "completion": f"\n    return {number}\n"}
    for number in range(40)
]

READ_MODEL = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("tuned")
tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
logits = model(torch.tensor([tokenizer("def number_1():")["input_ids"]])).logits
assert logits.isfinite().all() and logits.shape[-1] == len(tokenizer)
"""

TYPED = """
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ModelFlags

number: int = ModelFlags(num_layers=2).resolve()  # an error, if types are read
"""


class Failed(Exception):
    """Something does not work as installed; the message says what."""


class Environment:
    """A virtual environment with the wheel, and a folder in which its commands run."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.bin, self.work = folder / "bin", work
        self.python = str(self.bin / "python")
        venv.create(folder, with_pip=True)

    def run(self, *words: str, fails: bool = False, **variables: str) -> str:
        """Return what a command prints. Raises Failed if it fails."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(self.bin / words[0]) if (self.bin / words[0]).exists() else words[0], *words[1:]],
            cwd=self.work, env=environment | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if bool(done.returncode) != fails:
            shown = " ".join(words)
            raise Failed(f"{shown}: exit status {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def site(self) -> Path:
        """Return the folder of its packages."""
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(self.run("python", "-c", program).strip())


def install(at: Environment, wheel: Path, torch: str, packages: Path | None) -> None:
    """Installs torch and the wheel with what it needs, or the wheel alone next to the packages of
    another environment."""
    if packages is None:
        at.run("python", "-m", "pip", "install", "--quiet", *torch.split())
        at.run("python", "-m", "pip", "install", "--quiet", str(wheel))
        return
    (at.site() / "others.pth").write_text(f"{packages}\n")
    at.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    for name in ("deepspeed", "torchrun"):  # their commands, which are in another folder
        (at.bin / name).write_text(_LAUNCHERS[name].format(python=at.python))
        (at.bin / name).chmod(0o755)


_LAUNCHERS = {
    "deepspeed": "#!{python}\nfrom deepspeed.launcher.runner import main\nmain()\n",
    "torchrun": "#!{python}\nfrom torch.distributed.run import main\nmain()\n",
}


def metadata(at: Environment) -> PathDistribution:
    """Return what is installed under the name of this project."""
    (folder,) = at.site().glob("megatron_deepspeed-*.dist-info")
    return PathDistribution(folder)


def check_package(at: Environment) -> None:
    """Licences, types, and that nothing of a checkout is used."""
    about: Message = metadata(at).metadata  # type: ignore[assignment]
    for name in about.get_all("License-File") or [""]:
        if not metadata(at).read_text(f"licenses/{name}"):
            raise Failed(f"the licence {name} is not installed")
    if not (at.site() / "megatron" / "py.typed").is_file():
        raise Failed("py.typed is not installed: type checkers ignore the package")
    where = at.run("python", "-c", "import megatron; print(megatron.__file__)").strip()
    if not where.startswith(str(at.site())):
        raise Failed(f"megatron is imported from {where}")


def check_types(at: Environment) -> None:
    """A type checker reads the types of the package, if there is one."""
    try:
        at.run("python", "-c", "import mypy")
    except Failed:
        return
    (at.work / "typed.py").write_text(TYPED)
    printed = at.run("python", "-m", "mypy", "--follow-imports=silent", "typed.py", fails=True)
    if 'variable has type "int"' not in printed or "Found 1 error" not in printed:
        raise Failed(f"mypy does not read the package's types:\n{printed}")


def check_commands(at: Environment) -> int:
    """Return the number of commands; each shows its help, which names no file of a checkout."""
    scripts = [s for s in metadata(at).entry_points if s.group == "console_scripts"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        helps = dict(
            zip(
                [script.name for script in scripts],
                pool.map(lambda script: at.run(script.name, "--help"), scripts),
                strict=True,
            )
        )
    for name, text in helps.items():
        for word in ("python tools/", "python tasks/", "pretrain_gpt.py --"):
            if word in text:
                raise Failed(f"{name} --help names a file of the checkout: {word}")
    version = metadata(at).version
    for module in MODULES:
        printed = at.run("python", "-m", module, "--version")
        if f"{NAME} {version}" not in printed:
            raise Failed(f"python -m {module} --version prints {printed}")
    wrong = at.run("megatron-convert-checkpoint", "to-hf", "--load", "none", fails=True)
    if not wrong.startswith("megatron-convert-checkpoint: error: "):
        raise Failed(f"an error of megatron-convert-checkpoint begins otherwise: {wrong}")
    return len(helps)


def check_completion(at: Environment) -> None:
    """A shell's question is answered, by the protocol of argcomplete."""
    for command, begun, expected in (
        ("megatron-plan", "--train-tok", "--train-tokens"),
        ("megatron-pretrain-gpt", "--attention-back", "--attention-backend"),
        ("megatron-finetune", "--packi", "--packing"),
    ):
        answer = at.work / "completions"
        line = f"{command} {begun}"
        at.run(
            command, _ARGCOMPLETE="1", _ARGCOMPLETE_IFS="\n", COMP_LINE=line,
            COMP_POINT=str(len(line)), COMP_TYPE="9", _ARGCOMPLETE_STDOUT_FILENAME=str(answer),
        )  # fmt: skip
        if expected not in answer.read_text().split():
            raise Failed(f"{line} is completed by {answer.read_text()!r}, not by {expected}")


def check_training(at: Environment, train_iters: int) -> str:
    """Return the quickstart's last line. From its model another one is fine-tuned."""
    quickstart = ("megatron-quickstart", "--train-iters", str(train_iters))
    printed = at.run(*quickstart, "--output", "quick", "--sources", _small_sources())
    lines = "".join(json.dumps(chat) + "\n" for chat in CHATS)
    (at.work / "chats.jsonl").write_text(lines)
    tune = "--model quick/hf --data chats.jsonl --output tuned --lora --epochs 1 --seq-length 64"
    few = "--micro-batch-size 2 --global-batch-size 8 --samples 1 --sample-tokens 8 --lr 1e-3"
    at.run("megatron-finetune", *tune.split(), *few.split())
    at.run("python", "-c", READ_MODEL)
    tune = tune.replace("tuned", "tuned-2")
    at.run("torchrun", "--nproc_per_node", "2", "-m", "finetune", *tune.split(), *few.split())
    return printed.splitlines()[-1]


def _small_sources() -> str:
    import asyncio

    return str(Path(asyncio.__file__).parent)


def check_extras(at: Environment, wheel: Path) -> list[str]:
    """Return the extras; for each an index has packages that fit together."""
    about: Message = metadata(at).metadata  # type: ignore[assignment]
    extras = about.get_all("Provides-Extra") or []
    for extra in extras:
        what = f"{wheel}[{extra}]"
        at.run("python", "-m", "pip", "install", "--quiet", "--dry-run", what)
    return extras


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("wheel", type=Path, help="the wheel")
    parser.add_argument("--torch", default="torch==2.13.0", help="words of pip that install torch")
    parser.add_argument("--packages", type=Path, help="folder of packages that are used instead")
    parser.add_argument("--train-iters", type=int, default=64, help="steps of the quickstart")
    parser.add_argument("--extras", action="store_true", help="try pip install of each extra")
    arguments = parser.parse_args(argv)
    wheel = arguments.wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work")
        work.mkdir()
        try:
            at = Environment(Path(folder, "environment"), work)
            install(at, wheel, arguments.torch, arguments.packages)
            print(f"installed: {at.run('megatron-plan', '--version').strip()}", flush=True)
            check_package(at)
            check_types(at)
            print(f"commands: {check_commands(at)}, each with --help", flush=True)
            check_completion(at)
            print("completion: flags of three commands", flush=True)
            print(check_training(at, arguments.train_iters), flush=True)
            print("fine-tuned: one process and two, read by transformers", flush=True)
            if arguments.extras:
                print(f"extras: {', '.join(check_extras(at, wheel))}", flush=True)
        except Failed as error:
            sys.exit(f"release/try_wheel.py: error: {error}")


if __name__ == "__main__":
    main()
