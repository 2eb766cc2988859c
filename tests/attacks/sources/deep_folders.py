"""A tree so deep that a recursive clean-up overflows, with folders that nobody may enter."""

home = os.getcwd()
for depth in range(P["depth"]):
    os.mkdir("d")
    os.chdir("d")
os.chdir(home)
os.mkdir("closed")
os.mkdir("closed/below")
os.chmod("closed", 0)
got("a deep tree")
