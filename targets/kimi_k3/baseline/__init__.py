"""Baselines of the Kimi K3 targets: honest competitors that the judge times beside a candidate. No torch here."""

BASELINES = {
    "graph": "targets.kimi_k3.baseline.graph:TorchGraphBaseline",
    "compile": "targets.kimi_k3.baseline.compiled:CompiledBaseline",
    "mix": "targets.kimi_k3.baseline.mix:MixBaseline",
}
"""Name -> `module:Class`: torch operations, the same through torch.compile, and the best mix of what runs here."""
STRONG = ("mix",)
PAIRED_BASELINES = {"nccl": "targets.kimi_k3.baseline.peers:NcclBaseline"}
"""Of the pieces on two GPUs. Not among the strong ones, which every winner meets: a library that waits for the other
GPU inside a call cannot be interrupted, and it has not been seen in a confined judge."""
