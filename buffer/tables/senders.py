"""The table `senders`: every process that was ever let in."""

from tba.buffer.database import DatabaseFile
from tba.buffer.tables.runs import Run


class Senders:
    """The senders of all runs of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database

    def number(self, run: Run, sender: str, role: str) -> int:
        """The number of a sender, made if it is new."""
        self._database.execute(
            "INSERT INTO senders (run, sender, role) VALUES (?, ?, ?) ON CONFLICT (sender) DO NOTHING",
            (run.id, sender, role),
        )
        return int(self._database.one("SELECT id FROM senders WHERE sender = ?", sender)[0])

    def describe(self, sender: str, host: str, pid: int) -> None:
        """Where a sender runs."""
        self._database.execute("UPDATE senders SET host = ?, pid = ? WHERE sender = ?", (host, pid, sender))

    def trainers(self, run: Run) -> list[tuple[str, str]]:
        """(sender, host) of the trainers that were let in, oldest first."""
        query = "SELECT sender, COALESCE(host, '') FROM senders WHERE run = ? AND role = 'trainer' ORDER BY id"
        return self._database.all(query, run.id)
