"""Weight update: gradient reduction, norm and clipping, Adam, and formats of its states."""
