"""Kimi K3 decode: one tensor-parallel rank's run of layers and the pieces it is made of. `spec` registers the targets."""
