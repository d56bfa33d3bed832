"""Charts as SVG and pages as single HTML files."""
