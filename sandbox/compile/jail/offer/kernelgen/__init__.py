"""Helpers for candidates. `from kernelgen import timeline` marks the phases of a kernel (docs/candidate.md)."""
