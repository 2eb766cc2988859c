"""Source to artifact: a trusted server, and the boxed workers (`jail`) in which candidate Python runs.

Nothing outside `jail` imports a candidate, and `jail` imports nothing of the project.
"""
