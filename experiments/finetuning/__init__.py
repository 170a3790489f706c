"""Starting from the weights of another run: which weights train, how fast, and what is added."""
