"""Model architectures, their weights and how they are loaded."""
