"""Training: the compiled step, and a run from its first step to its last."""
