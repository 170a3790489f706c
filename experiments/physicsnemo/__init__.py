"""Models of PhysicsNeMo: their files, arguments and weights, both ways."""
