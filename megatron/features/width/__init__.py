"""Learning rates and initial weights that stay right as a model becomes wider or deeper."""
