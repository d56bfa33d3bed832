"""Problems whose answer is worked out in the completion, step by step."""
