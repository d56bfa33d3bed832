"""Studies: published claims as values, each with its arms, seeds, measure and what counts, written before the runs; and
the machinery that runs them and says whether a claim holds here."""
