"""LoRA adapters: a model with a few small trained matrices beside its own, frozen weights."""
