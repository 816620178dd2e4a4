"""Matrix products in 8 bits."""
