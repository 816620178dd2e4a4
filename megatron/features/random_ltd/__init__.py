"""Random layerwise token dropping (random-LTD)."""
