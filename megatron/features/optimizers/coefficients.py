"""Coefficients of Newton-Schulz iterations, and names of the rules that scale updates."""

from __future__ import annotations

Coefficients = tuple[tuple[float, float, float], ...]

COEFFICIENTS: dict[str, tuple[Coefficients, bool]] = {
    "simple": (((3.4445, -4.7750, 2.0315),), True),
    "quintic": (
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        True,
    ),
    "polar_express": (
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.875, -1.25, 0.375),
        ),
        False,
    ),
    "cans": (
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        False,
    ),
}
"""Coefficients (a, b, c) of each Newton-Schulz step by name, and whether further steps start again
with the first instead of repeating the last. ``simple`` is from Jordan et al. 2024 (Muon),
Moonlight and torch; ``quintic`` is Megatron-LM's default; ``polar_express`` is from Amsel et al.
2025 (arXiv:2505.16932); ``cans`` is from Grishina et al. 2025 (arXiv:2506.10935)."""

SCALES = ("spectral", "unit_rms_norm", "shape_scaling")
"""Rules that scale updates, implemented by ``newton_schulz.scale``."""
