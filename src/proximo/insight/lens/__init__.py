"""A stored step as any algorithm sees it, token by token."""
