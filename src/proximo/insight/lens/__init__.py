"""A stored step under any algorithm, token by token."""
