"""Programs around training, one folder each."""
