"""Help texts, and completion scripts made from them."""
