"""Preprocessing of text to indexed files: read, parse, split, tokenize in several processes, write.

files of --input -> blocks of whole records -> worker: texts -> token ids -> its place in the .bin
                                                      counts -> lengths, journal -> .idx
"""
