"""What a CUDA error means for a verdict: the kernel's fault, a hang, or the machine's.

Names only; that a context is unusable after a fault, and what to do then, is for the judge's server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sandbox.devices.base import Faulted
from sandbox.devices.cuda_driver import CudaError
from sandbox.verdict import Failure, Status

# What a kernel, or a launch as the plan describes it, can cause; in words for people and models.
KERNEL_FAULTS = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "the kernel read or wrote memory outside every allocation",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a load or store was not aligned to its size",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "an instruction got an address of another memory space",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an instruction or its operands are illegal",
    "CUDA_ERROR_INVALID_PC": "the program counter left the kernel",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "the call stack is corrupt or overflowed",
    "CUDA_ERROR_LAUNCH_FAILED": "the kernel broke while running (shared or cluster memory, barriers, copies)",
    "CUDA_ERROR_ASSERT": "the kernel asserted",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the launch needs more registers or threads than an SM has",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "the cooperative grid does not fit on the device at once",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": "the cluster does not fit the kernel or the device",
    "CUDA_ERROR_CLUSTER_OUT_OF_RESOURCES": "no such cluster fits on the device",
    "CUDA_ERROR_CONTAINED": "the kernel touched poisoned memory",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "the kernel ended without freeing its tensor memory",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the kernel ran longer than the driver allows",
}
HANGS = ("CUDA_ERROR_LAUNCH_TIMEOUT",)
# The plan asks for something the driver refuses before anything runs.
REFUSED_LAUNCHES = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED")  # fmt: skip


def faulted(error: CudaError) -> Faulted:
    """`fault` or `hang` where the kernel or its launch is to blame, else `infra` (no memory, lost GPU, driver)."""
    where = {"error": error.name, "call": error.call}
    if error.name in KERNEL_FAULTS:
        status = Status.HANG if error.name in HANGS else Status.FAULT
        return Faulted(
            status, Failure("cuda-fault", f"{KERNEL_FAULTS[error.name]} ({error.name})", where)
        )
    if error.name in REFUSED_LAUNCHES and error.call.startswith("launch"):
        message = f"the driver refuses {error.call} of the plan ({error.name})"
        return Faulted(Status.FAULT, Failure("launch-refused", message, where))
    return Faulted(Status.INFRA, Failure("cuda", f"{error.call} failed: {error.name}", where))


def hung(seconds: float) -> Faulted:
    """The stream did not become idle in time."""
    message = f"the kernels did not end within {seconds:g} s"
    return Faulted(Status.HANG, Failure("hang", message, {"seconds": seconds}))


@contextmanager
def errors_as_faults() -> Iterator[None]:
    """CudaError becomes Faulted."""
    try:
        yield
    except CudaError as error:
        raise faulted(error) from error
