"""runs.db: the record of runs. `Store` is its only writer; LangGraph keeps its checkpoints in the
same file.
"""

from agent.store.database import Corrupt, translate
from agent.store.queries import Queries
from agent.store.store import RunRow, Store

__all__ = ["Corrupt", "Queries", "RunRow", "Store", "translate"]
