"""parsolve."""
