"""Put links, a FIFO, a huge sparse file and a folder where a parent could collect results or clean up carelessly."""

here = os.getcwd()
attempt("symlink to the file", lambda: os.symlink(P["file"], here + "/artifact.json"))
attempt("symlink to its folder", lambda: os.symlink(os.path.dirname(P["file"]), here + "/folder"))
attempt("hard link", lambda: os.link(P["file"], here + "/kernel.ptx"))
attempt("fifo", lambda: os.mkfifo(here + "/plan.json"))
attempt(
    "sparse file", lambda: os.truncate(os.open(here + "/log.txt", os.O_CREAT | os.O_RDWR), 3 << 30)
)
attempt("move of the folder", lambda: os.rename(os.path.dirname(P["file"]), here + "/moved"))
attempt("removal of the file", lambda: os.unlink(P["file"]))
