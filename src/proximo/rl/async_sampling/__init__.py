"""Running ahead: later steps are sampled on a thread of their own while a step is trained."""
