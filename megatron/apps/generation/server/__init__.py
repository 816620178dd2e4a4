"""HTTP server for text generation."""
