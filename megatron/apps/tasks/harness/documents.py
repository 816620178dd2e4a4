"""Documents for lm-eval's tasks from local files, instead of the dataset that a task would
download."""

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
"""Title line of a WikiText article. Section headings have more equals signs."""


def file_in(folder: str | None, name: str, flag: str) -> Path | None:
    """Return the file of a task in the user's folder of documents, or None if the folder has none.
    ``flag`` is the flag that selected the task, for messages. Raises ConfigError if several files
    match."""
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
    """Return the changes to a task's configuration that make it read its documents from a file.
    Raises ConfigError or ValueError, naming the file, if it cannot be read as documents."""
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
    """Return the documents of a file: the objects in JSON lines, a JSON array or Parquet, with the
    fields of the task's own dataset, or the articles of a WikiText file. Raises ConfigError or
    ValueError, naming the file and the expected content, if the file cannot be read."""
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
    """Return the articles of a WikiText file, each starting with its title."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _TITLE.fullmatch(line):
            pages.append([])
        pages[-1].append(line)
    joined = ("\n".join(lines) for lines in pages)
    return [page for page in joined if page.strip()]
