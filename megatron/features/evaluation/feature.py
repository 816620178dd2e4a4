"""Feature that evaluates a checkpoint's model, for use by programs and by other features."""

from __future__ import annotations

from megatron.config.features import Feature

FEATURE = Feature()
