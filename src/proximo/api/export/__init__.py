"""Models after training, for other programs: a folder, the Hugging Face hub, GGUF for llama.cpp, or a LoRA adapter."""
