"""A user's own target file, as `--target path/to/fake_target.py:Fake` loads it."""

from agent.fakes import FakeTarget as Fake

__all__ = ["Fake"]
