"""Training of draft heads: text from the target itself, packed."""
