"""Proves a GPU box with the driver alone: cuInit, a context, memory, one kernel whose result is known."""

import ctypes
import os
import sys

sys.path.insert(0, os.environ["BOX_LIB"])
import boxed

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 out)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    mad.lo.s32 %r2, %r1, 3, 7;
    st.global.u32 [%rd3], %r2;
    ret;
}
"""
COUNT = 64


def checked(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise RuntimeError(f"{name} gives {code}")


boxed.narrow()
boxed.ready()
boxed.receive()
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, module, function = (
        ctypes.c_int(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
    )
    memory, values = ctypes.c_uint64(), (ctypes.c_int * COUNT)()
    checked("cuInit", 0)
    checked("cuDeviceGet", ctypes.byref(device), 0)
    checked("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    checked("cuCtxSetCurrent", context)
    checked("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * COUNT))
    checked("cuModuleLoadData", ctypes.byref(module), PTX)
    checked("cuModuleGetFunction", ctypes.byref(function), module, b"fill")
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(memory), ctypes.c_void_p))
    checked("cuLaunchKernel", function, 1, 1, 1, COUNT, 1, 1, 0, None, parameters, None)
    checked("cuCtxSynchronize")
    checked("cuMemcpyDtoH_v2", values, memory, ctypes.c_size_t(4 * COUNT))
    boxed.send({"values": list(values)})
except (OSError, RuntimeError, AttributeError) as error:
    boxed.send({"error": str(error)})
