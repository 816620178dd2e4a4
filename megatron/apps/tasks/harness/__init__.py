"""lm-evaluation-harness on models of this project: tasks of its own and of local files, in any
layout, without an export."""
