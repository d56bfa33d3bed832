"""The claims of the field, and the page that has the verdict of each."""
