"""Programs around training, a folder each."""
