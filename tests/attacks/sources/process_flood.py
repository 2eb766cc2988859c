"""Have more children alive at once than the limit allows; each ends by itself."""

count = 0
try:
    while count < P["processes"]:
        if os.fork() == 0:
            rename_process("kg-" + P["nonce"])
            time.sleep(P["seconds"])
            os._exit(0)
        count += 1
except OSError as error:
    say(f"NO more children: {error}")
time.sleep(0.5)
if count >= P["processes"]:
    got(f"{count} children")
