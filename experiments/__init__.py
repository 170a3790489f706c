"""Config-driven experiments: data, training, evaluation, checkpoints, PhysicsNeMo weights."""
