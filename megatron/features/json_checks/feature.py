"""Feature that checks DeepSpeed JSON files for keys and values that DeepSpeed or this trainer would
misread, ignore, or fail on only later. Error messages name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def check_engine(self, content: Mapping[str, Any], config: Any) -> Sequence[str]:
        from megatron.features.json_checks.completed import refuse

        refuse(dict(content), config)
        return ()


FEATURE = JsonChecks()
