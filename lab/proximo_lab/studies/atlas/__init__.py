"""Published claims, and the page that has the verdict of each."""
