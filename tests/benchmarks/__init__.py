"""Tests of what measures proposers."""
