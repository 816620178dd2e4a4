"""Feature for attention to an encoder's output, which T5 and Retro use."""

from __future__ import annotations

from megatron.config.features import Feature

FEATURE = Feature()
