"""The folder of a start of a run, ``run/001`` and so on in the folder of its checkpoints:

- ``record.json``: command, listed variables, versions, git, data, hosts, and how it ended;
- ``config.json``: the completed configuration, by its sections, and ``deepspeed.json``;
- ``requirements.txt``: the packages; ``command.sh``: the same command again;
- ``changes.patch``: changes of git's files, and new modules that the run imports, if any.

Variables, flags and files are recorded if they are listed; no secrets are in them. It appears
whole.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron
from megatron.config import RunConfig
from megatron.data.build import DataFile
from megatron.features.run_record.hosts import RankPlace, by_host
from megatron.features.run_record.patch_secrets import without_values
from megatron.features.run_record.source_tree import SourceTree, source_tree
from megatron.features.run_record.surroundings import (
    as_json,
    installed_packages,
    launched_command,
    own_command,
    recorded_variables,
    shell_script,
)
from megatron.run.fingerprint import tokenizer_digest, versions
from megatron.run.run import Run
from megatron.training.resume import ResumePoint
from megatron.util.files import sync_path, write_whole
from megatron.util.secrets import HIDDEN, Redactor

FORMAT = 1
FOLDER = "run"
"""In the folder of checkpoints."""


class StartRecord:
    """Writes the folder of this start. Raises OSError if it cannot be written.

    Args:
        save: the folder of checkpoints.
        files: of the data.
        places: of all ranks, in their order.
    """

    def __init__(
        self,
        save: Path,
        run: Run,
        begin: ResumePoint,
        files: Sequence[DataFile],
        places: Sequence[RankPlace],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._redactor = Redactor(environment)
        starts = save / FOLDER
        starts.mkdir(parents=True, exist_ok=True)
        for left in starts.glob("*.partial-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        taken = [int(path.name) for path in starts.iterdir() if path.name.isdigit()]
        number = 1 + max(taken, default=0)
        self.folder = starts / f"{number:03d}"
        tree = source_tree(Path(megatron.__file__).parent, named_paths(run.config))
        self._record = self._redactor.tree(
            {
                "format": FORMAT,
                "start": number,
                "began": _now(),
                "ended": None,
                "end": None,
                "iteration": begin.iteration,
                "consumed_samples": begin.consumed_samples,
                "loaded": None if begin.folder is None else str(begin.folder),
                "folder": os.getcwd(),
                "environment": recorded_variables(environment, self._redactor),
                "given": _given(run.resolved.origins),
                "versions": {"megatron": megatron.__version__, **versions()},
                "git": None if tree is None else _git_state(tree),
                "data": [file._asdict() for file in files],
                "tokenizer": tokenizer_digest(run.config.tokenizer),
                "world_size": len(places),
                "hosts": by_host(places),
            }
        )
        command = own_command(self._redactor)
        hosts = len({place.host for place in places})
        launcher = launched_command(command, hosts, len(places))
        self._record |= {"command": command, "launcher": launcher}
        self._publish(self._files(run, tree))

    def end(self, iteration: int, reason: str) -> None:
        """Adds when and why the run ended, after which iteration."""
        self._record |= {
            "ended": _now(),
            "end": self._redactor.text(reason),
            "last_iteration": iteration,
        }
        write_whole(self.folder / "record.json", as_json(self._record))

    def _files(self, run: Run, tree: SourceTree | None) -> dict[str, bytes]:
        record, hide = self._record, self._redactor
        title = [
            f"start {record['start']} of {self.folder.parent.parent}, {record['began']}",
            f"{HIDDEN} is what was secret",
        ]
        if len(record["hosts"]) > 1:
            title.append(f"the command of one of {record['world_size']} processes")
        script = shell_script(
            "; ".join(title),
            record["folder"],
            record["environment"],
            record["launcher"] or record["command"],
        )
        packages = [hide.text(line) for line in installed_packages()]
        files = {
            "record.json": as_json(record),
            "config.json": as_json(hide.tree(run.config.to_dict())),
            "deepspeed.json": as_json(hide.tree(run.content)),
            "requirements.txt": "".join(f"{line}\n" for line in packages).encode(),
            "command.sh": os.fsencode(script),
        }
        if tree is not None and tree.patch:
            patch = without_values(hide.text(tree.patch.decode(errors="surrogateescape")))
            files["changes.patch"] = patch.encode(errors="surrogateescape")
        return files

    def _publish(self, files: Mapping[str, bytes]) -> None:
        part = self.folder.with_name(f"{self.folder.name}.partial-{os.urandom(8).hex()}")
        part.mkdir()
        try:
            for name, content in files.items():
                (part / name).write_bytes(content)
                sync_path(part / name)
            (part / "command.sh").chmod(0o755)
            part.rename(self.folder)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            raise


def named_paths(config: RunConfig) -> set[Path]:
    """The paths that a configuration names, as far as a text may be one: data, models, outputs."""
    waiting: list[Any] = [config.to_dict()]
    found = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and value and "\0" not in value and "://" not in value:
            found.add(Path(os.path.realpath(value.partition("@")[0])))
    return found


def _git_state(tree: SourceTree) -> dict[str, Any]:
    return {
        "commit": tree.commit,
        "branch": tree.branch,
        "remote": tree.remote,
        "changed": bool(tree.patch or tree.left_out),
        "left_out": list(tree.left_out),
    }


def _given(origins: Mapping[str, str]) -> dict[str, str]:
    """Where values come from that are no defaults."""
    return {name: origin for name, origin in origins.items() if origin != "default"}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
