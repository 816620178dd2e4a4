"""What a run's folder says of each of its starts, so that a person can repeat it: see
``folder`` for the files, ``callback`` for when they are written."""
