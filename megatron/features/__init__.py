"""Subjects that a run can have next to pretraining, a folder each."""

# A configuration has the flags of every feature: whichever module of one is imported first, that
# comes before it.
import megatron.config  # noqa: F401
