"""LoRA adapters: a model with frozen weights and a few small trained matrices."""
