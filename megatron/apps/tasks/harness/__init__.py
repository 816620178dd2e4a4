"""lm-evaluation-harness (lm-eval) on models of this project, in any layout and without an export.
Tasks are those of lm-eval and those in local files."""
