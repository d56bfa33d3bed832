"""What commands print while and after they run."""
