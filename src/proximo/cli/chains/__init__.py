"""Commands that train several runs in turn."""
