"""Features that a run can have in addition to pretraining, one folder each."""

# A configuration contains every feature's flags. Import it before any module of a feature.
import megatron.config  # noqa: F401
