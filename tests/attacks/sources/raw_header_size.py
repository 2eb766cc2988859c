"""Declare a header of four gigabytes."""

os.write(P["result_fd"], b"\xff\xff\xff\xff" + b"{" * 60000)
time.sleep(1.0)
