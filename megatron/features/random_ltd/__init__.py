"""Random layerwise token dropping."""
