"""The gradient noise scale: up to which batch size more samples save steps."""
