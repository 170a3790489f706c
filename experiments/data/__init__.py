"""Data sets as models are trained on them: splits, moments, and batches on the device mesh."""
