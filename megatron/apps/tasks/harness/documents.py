"""Documents of lm-eval's tasks in files of this machine, instead of what a task would download."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.util.json_text import parse_json

_ROWS = (".jsonl", ".json", ".parquet")
_TEXT = (".txt", ".raw", ".tokens")
_TEXT_TASK = "wikitext"
_TITLE = re.compile(r"\s*= (?!=).*(?<!=) =\s*")
"""A line of WikiText that begins an article; lines of its sections have more signs."""


def file_in(folder: str | None, name: str, flag: str) -> Path | None:
    """Return the file of a task in the folder of the user's tasks, or None. ``flag`` names the
    tasks. Raises ConfigError if several files have such a name."""
    if folder is None:
        return None
    endings = _ROWS + _TEXT if name == _TEXT_TASK else _ROWS
    begins = "wiki" if name == _TEXT_TASK else name
    fitting = sorted(
        path
        for path in Path(folder).iterdir()
        if path.name.startswith(begins) and path.suffix in endings and path.is_file()
    )
    if len(fitting) > 1:
        raise ConfigError(
            f"{flag} {name}: {folder} has several files whose name begins with {begins}: "
            f"{', '.join(path.name for path in fitting)}; write {name}=FILE"
        )
    return fitting[0] if fitting else None


def reading(task: str, path: Path, flag: str) -> dict[str, Any]:
    """Changes of a task's configuration so that its documents come from a file. Raises ConfigError
    or ValueError, naming the file, if it cannot be read as such."""
    rows = rows_of(task, path, flag)

    def loaded(**_: Any) -> Any:
        import datasets

        return {"test": datasets.Dataset.from_list(list(rows))}

    return {
        "dataset_path": str(path),
        "dataset_name": None,
        "dataset_kwargs": None,
        "custom_dataset": loaded,
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": None,
    }


def rows_of(task: str, path: Path, flag: str) -> Sequence[dict[str, Any]]:
    """The documents of a file: objects of JSON lines, of a JSON array or of Parquet, with the
    fields of the task's own data set, or the articles of a WikiText. Raises ConfigError or
    ValueError, which names the file and what would be right."""
    where = f"{flag} {task}={path}"
    if not path.is_file():
        raise ConfigError(f"{where}: there is no such file")
    if path.suffix == ".parquet":
        import datasets

        return datasets.Dataset.from_parquet(str(path), keep_in_memory=True).to_list()  # type: ignore[no-any-return]
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: {error.reason}") from None
    if path.suffix not in _ROWS:
        if task != _TEXT_TASK:
            raise ConfigError(f"{where}: the file must end in {', '.join(_ROWS)}")
        rows: Any = [{"page": page} for page in articles(text)]
    elif text.lstrip().startswith("["):
        rows = parse_json(text, where, lenient=True)
    else:
        rows = [
            parse_json(line, f"{where}, line {number}", lenient=True)
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{where}: expected a JSON object for each document")
    return rows  # type: ignore[no-any-return]


def articles(text: str) -> list[str]:
    """The articles of a WikiText, each from its title on."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _TITLE.fullmatch(line):
            pages.append([])
        pages[-1].append(line)
    joined = ("\n".join(lines) for lines in pages)
    return [page for page in joined if page.strip()]
