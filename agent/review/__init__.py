"""What a person needs to decide on a kernel: the diff, the proof, the risks; and the decision itself.

Data and plain text only: colour and pages belong to `agent.commands` and `agent.serve`.
"""
