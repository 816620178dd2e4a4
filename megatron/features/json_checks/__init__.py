"""DeepSpeed JSON files, checked by name."""
