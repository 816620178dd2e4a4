"""lm-evaluation-harness on models of this project: its own tasks and tasks in local files, in any
layout, without an export."""
