"""Kimi K3 decode: one tensor-parallel rank's run of layers, and its pieces. `spec` registers the targets."""
