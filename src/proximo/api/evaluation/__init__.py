"""Results of evaluations: several models next to each other, pass@k, files of completions, adapters to other tools."""
