"""DeepSpeed JSON files are refused by name where DeepSpeed or this trainer would misunderstand or
ignore them, or fail on them later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature


class JsonChecks(Feature):
    def json_file(self, text: str, content: Any, path: str) -> Any:
        from megatron.features.json_checks.checks import check_text, checked

        if content is None:
            check_text(text, path)
            return None
        return checked(text, content, path)

    def json_notes(self, content: Any, path: str) -> Sequence[str]:
        if not content:
            return ()
        from megatron.features.json_checks.checks import file_notes

        return file_notes(content, path)


FEATURE = JsonChecks()
