"""A run on several processes, or ranks: rank 0 conducts, the others follow.

Rank 0 runs the loop as one process would: it collects, decides and writes. Where it asks its policy for a pass, a
step or a state, every rank does its share: the model is in shards (FSDP2), and rows are dealt out in whole groups.
Nothing here is imported by a run of one process.
"""
