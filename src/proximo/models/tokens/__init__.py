"""Text to tokens and back: chat templates, prompts, replies, the spelling of each token."""
