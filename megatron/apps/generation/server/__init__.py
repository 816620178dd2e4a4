"""An HTTP server for a model that generates text."""
