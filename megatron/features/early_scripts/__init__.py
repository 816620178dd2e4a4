"""Scripts of 2019 and of OneFlow."""
