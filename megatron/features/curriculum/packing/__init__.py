"""Steps of bins: samples packed by their tokens, from the section of the JSON to the step."""
