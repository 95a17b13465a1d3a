"""The prefix cache: pages, state rows and the tree of checkpoints."""
