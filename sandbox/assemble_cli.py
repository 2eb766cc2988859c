"""`python -m sandbox.assemble_cli ARTIFACT OUT`: an artifact's machine code as files, for exports.

Lints and assembles as the cuda device does and writes `OUT/<sha256>.cubin`. One JSON document on stdout:
{"ptxas": version, "cubins": {sha256 of the PTX: sha256 of the cubin}, "resources": [...]}, or {"refused": message}
and exit code 1. It loads nothing on a GPU and opens no context.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from sandbox import artifact_store
from sandbox.artifact import digest
from sandbox.assemble import version
from sandbox.devices.base import Faulted, Refused
from sandbox.devices.cuda_toolchain import build
from sandbox.strict import Malformed


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m sandbox.assemble_cli ARTIFACT OUT", file=sys.stderr)
        return 2
    folder, out = Path(arguments[0]), Path(arguments[1])
    try:
        built = build(artifact_store.load(folder))
    except (Malformed, Refused, Faulted) as error:
        print(json.dumps({"refused": str(error)}))
        return 1
    cubins = {}
    for ptx, cubin in built.cubins.items():
        cubins[digest(ptx.encode())] = name = digest(cubin)
        (out / f"{name}.cubin").write_bytes(cubin)
    resources = [asdict(r) for r in built.resources]
    print(json.dumps({"ptxas": version(), "cubins": cubins, "resources": resources}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
