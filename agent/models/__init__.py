"""Who proposes: the Model and Proposer protocols, provider adapters, and proposers that need no
model.
"""
