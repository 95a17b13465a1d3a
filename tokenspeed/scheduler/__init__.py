"""What runs next: a pure function of its state and a numbered log."""
