"""Tasks made of data: what a row is asked as, which shape the rows have, and several sources in one task."""
