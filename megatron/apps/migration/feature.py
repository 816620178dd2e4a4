"""Feature that advises users of other trainers about unknown flags."""

from __future__ import annotations

from collections.abc import Callable, Container

from megatron.config.features import Feature


class MigrationFeature(Feature):
    def advice(
        self, flag: str, prog: str, known: Container[str], of_training: Callable[[], Container[str]]
    ) -> str | None:
        from megatron.apps.migration.advice import instead_of

        return instead_of(flag, prog, known, of_training)


FEATURE = MigrationFeature()
