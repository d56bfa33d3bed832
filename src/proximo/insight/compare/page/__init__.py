"""The report of a comparison, as Markdown and as a page."""
