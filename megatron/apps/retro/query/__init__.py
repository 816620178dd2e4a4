"""The neighbours of chunks: the search for them, and the stage that searches for a GPT's."""
