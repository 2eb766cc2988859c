"""Which layer stops which attack, as a table: every attack in every way that this machine offers, once.

    python -m tests.attacks.attack_layers > layers.txt

Needs root, for both users. It prints what was seen; whether an attack is stopped at all is `test_attacks`' to say.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.attacks.attack_catalog import ATTACKS, layers
from tests.attacks.conftest import Client

WAYS = {
    "root": ("strict A", "strict B", "landlock", "seccomp"),
    "user": ("strict A", "landlock", "weak"),
}


def main() -> None:
    for user, ways in WAYS.items():
        base = Path(tempfile.mkdtemp(prefix=f"kernelgen-layers-{user}-"))
        client = Client(user, base)
        if client.problem:
            print(f"started by {user}: {client.problem}")
            continue
        for attack in ATTACKS:
            seen: dict[str, list[str]] = defaultdict(list)
            for way in ways:
                outcome = client.ask(attack.asked(way))
                if "missing" in outcome:
                    continue
                through = attack.through(outcome)
                said = (
                    "GETS THROUGH" if through else ", ".join(layers(attack, outcome)) or "not known"
                )
                seen[said].append(way)
            told = "; ".join(f"{', '.join(found)}: {said}" for said, found in seen.items())
            print(f"{user:<5} {attack.name:<22} {told}", flush=True)
        client.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    assert os.getuid() == 0, "run as root"
    main()
