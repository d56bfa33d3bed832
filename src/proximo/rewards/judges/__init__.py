"""Language models behind a server that judge completions by a rubric."""
