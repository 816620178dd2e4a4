"""Models in files of llama.cpp (GGUF): read, and written."""
