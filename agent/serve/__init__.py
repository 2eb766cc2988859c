"""`kernelgen serve`: runs, progress, diffs with the proof and decisions as pages on this machine.

For the person at the machine only: bound to loopback, behind a token. It is no service for others.
"""
