"""Ends before READY with a message."""

raise SystemExit("the interpreter is broken")
