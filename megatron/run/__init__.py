"""From a command line to the processes of a run."""
