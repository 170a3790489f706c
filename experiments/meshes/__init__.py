"""Meshes and fields of simulations: files read, samples stored, predictions written."""
