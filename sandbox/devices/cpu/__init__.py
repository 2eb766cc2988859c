"""Device `cpu`: an artifact's PTX translated to LLVM IR and run without a GPU. See `device` for what it checks.

It does not measure time; `modelled_us` is a model. It is not a sandbox: generated code runs in this process.
"""

from sandbox.devices.cpu.device import CpuDevice

__all__ = ["CpuDevice"]
