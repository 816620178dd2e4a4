"""The update of the weights: gradient norm and clipping, Adam, how its states are stored."""
