"""Pictures and tables of the metrics of runs."""
