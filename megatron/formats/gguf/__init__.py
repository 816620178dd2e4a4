"""Reading and writing of models in llama.cpp's file format (GGUF)."""
