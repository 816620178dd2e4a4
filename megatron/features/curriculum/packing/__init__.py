"""Steps of bins, which contain samples packed by their number of tokens."""
