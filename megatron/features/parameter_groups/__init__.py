"""Groups of parameters that flags choose by name."""
