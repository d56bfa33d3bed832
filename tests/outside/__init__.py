"""What a stranger writes: pieces in a file of their own, which know nothing of Proximo but its public names."""
