"""Record of each start of a run, in the folders ``run/001`` and so on in the checkpoint folder:

- ``record.json``: command, listed environment variables, versions, git, data, hosts, and how the
  start ended;
- ``config.json``: the completed configuration by section; ``deepspeed.json``: that of DeepSpeed;
- ``requirements.txt``: the installed packages; ``command.sh``: a script that repeats the command;
- ``changes.patch``: changes of files tracked by git, and new modules that the run imports, if any.

Only listed variables, flags and files are recorded, without secrets. The folder appears only once
it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron
from megatron.config import RunConfig
from megatron.data.build import DataFile
from megatron.features.agreement.facts import versions
from megatron.features.run_record.source_tree import SourceTree, source_tree, without_values
from megatron.features.run_record.surroundings import (
    RankPlace,
    by_host,
    installed_packages,
    launched_command,
    own_command,
    recorded_variables,
    shell_script,
)
from megatron.formats.digests import tokenizer_digest
from megatron.parallel.mesh import Mesh
from megatron.run.run import Run
from megatron.training.report import say
from megatron.training.resume import ResumePoint
from megatron.training.trainer import Callback, Trainer
from megatron.util.errors import lost_output, one_line
from megatron.util.files import sync_path, write_whole
from megatron.util.secrets import HIDDEN, Redactor

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "run"
"""Folder for the records, relative to the checkpoint folder."""


class StartRecord:
    """Record of this start, written to a new folder in the checkpoint folder ``save``. ``places``
    has the place of each rank, by rank. Raises OSError if the record cannot be written."""

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
        for left in starts.glob("*.partial-*"):  # left by a killed process
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
                "given": {n: o for n, o in run.resolved.origins.items() if o != "default"},
                "versions": {"megatron": megatron.__version__, **versions()},
                "git": None if tree is None else tree.state(),
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
        """Add when and why the start ended, and its last iteration."""
        self._record |= {
            "ended": _now(),
            "end": self._redactor.text(reason),
            "last_iteration": iteration,
        }
        write_whole(self.folder / "record.json", _as_json(self._record))

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
            "record.json": _as_json(record),
            "config.json": _as_json(hide.tree(run.config.to_dict())),
            "deepspeed.json": _as_json(hide.tree(run.content)),
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
    """Return the real paths of all strings in a configuration, since any can be a path to data,
    models or outputs. URLs are skipped."""
    waiting: list[Any] = [config.to_dict()]
    paths = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and value and "\0" not in value and "://" not in value:
            paths.add(Path(os.path.realpath(value.partition("@")[0])))
    return paths


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _as_json(value: object) -> bytes:
    """Return indented JSON for human readers, with keys in the given order."""
    return json.dumps(value, indent=1, default=str).encode() + b"\n"


class RunRecorder(Callback):
    """Callback that writes the record of this start, on the main process of a run that saves
    checkpoints. If the record cannot be written, the run continues with a warning."""

    def __init__(
        self,
        run: Run,
        mesh: Mesh,
        begin: ResumePoint,
        files: Sequence[DataFile],
        places: Sequence[RankPlace],
    ) -> None:
        self._record: StartRecord | None = None
        self._iteration, self._reason = begin.iteration, "the end of its plan"
        if mesh.world.rank:
            return
        assert run.config.checkpoint.save is not None
        save = Path(run.config.checkpoint.save)
        try:
            self._record = StartRecord(save, run, begin, files, places)
        except OSError as error:
            logger.warning("the record of this start is missing: %s", one_line(error))
            return
        say(f"command, versions, code and data of this start: {self._record.folder}")

    def after_step(self, trainer: Trainer, step: object) -> None:
        self._iteration = trainer.iteration

    def went_back(self, trainer: Trainer) -> None:
        self._iteration = trainer.iteration

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        if reason is not None:
            self._reason = reason

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if self._record is None:
            return
        if error_type is not None:
            self._reason = f"{error_type.__name__}: {error[0]}"
        try:
            reason = "; ".join([self._reason, *lost_output()])
            self._record.end(self._iteration, reason)
        except OSError as failure:
            logger.warning("%s: %s", self._record.folder, one_line(failure))
