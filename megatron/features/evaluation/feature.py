"""Evaluation of a checkpoint's model, for programs and for features that need a second model."""

from __future__ import annotations

from megatron.config.features import Feature

FEATURE = Feature()
