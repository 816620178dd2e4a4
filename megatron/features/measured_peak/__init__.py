"""Peak FLOP rate of a device."""
