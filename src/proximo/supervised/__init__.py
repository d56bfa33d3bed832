"""Training from files: supervised fine-tuning, reward models, DPO."""
