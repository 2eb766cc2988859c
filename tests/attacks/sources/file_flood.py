"""More files than the limit allows, all empty: they cost the kernel memory that no size shows."""


def flood(folder):
    os.makedirs(folder, exist_ok=True)
    for index in range(P["files"]):
        os.close(os.open(f"{folder}/{index}", os.O_CREAT | os.O_WRONLY))
    time.sleep(0.5)


attempt(f"{P['files']} files", lambda: flood("many"))
