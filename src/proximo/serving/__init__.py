"""An OpenAI-compatible endpoint and a chat page for one model."""
