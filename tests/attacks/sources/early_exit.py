"""End in the middle of a frame, with exit status 0."""

os.write(P["result_fd"], b'\0\0\0\x40{"body": {"status": "pas')
os._exit(0)
