"""Groups of parameters that flags select by name."""
