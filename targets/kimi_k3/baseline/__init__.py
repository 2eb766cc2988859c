"""Baselines of the Kimi K3 targets: honest competitors that the judge times beside a candidate."""
