"""Open a file by its handle, which passes by mount namespaces where the caller has CAP_DAC_READ_SEARCH."""


class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]


def reopen():
    handle, mount = Handle(size=128), ctypes.c_int()
    call(
        "name_to_handle_at",
        -100,
        os.getcwd().encode(),
        ctypes.byref(handle),
        ctypes.byref(mount),
        0,
    )
    folder = os.open("/", os.O_RDONLY)
    os.close(call("open_by_handle_at", folder, ctypes.byref(handle), os.O_RDONLY))


attempt("a file by its handle", reopen)
