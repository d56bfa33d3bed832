"""Sends a run to experiment trackers: wandb, trackio, tensorboard, mlflow, or a class of the user's own.

Everything is read from the run folder by one process per tracker, so a tracker that hangs or fails cannot stop or slow
a run. How far each tracker has got is stored in the run folder, and a later process continues there. No file of this
room imports torch.
"""
