"""Collecting a corpus: from dumps, URL lists and downloaded pages to JSON lines worth training on.

Each module is the logic of one tool of tools/ or tools/openwebtext/; tools/README.md says in which
order they are used. All work on local files, in bounded memory where the task allows, through
`job`: a killed run continues, and its output equals that of a run that was not.
"""
