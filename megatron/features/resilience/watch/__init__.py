"""Detection of hangs: finds the ranks that do not advance, and the cause."""
