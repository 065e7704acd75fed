"""The saved queries of the SQL page: those of tba, and `queries/NAME.sql` in the directory of a run.

A saved query has a permanent address, `/r/RUN/sql?query=NAME`. In its text, `{run}` stands for the name of the run.
"""

import re
import stat
from pathlib import Path

from tba.ui.runs import Run

DIRECTORY = "queries"
_MOST_FILES = 200
_MOST_BYTES = 64 << 10
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,98}\.sql")

_BUILT_IN = {
    "best responses": """SELECT id, reward, policy_version, prompt_text, answer, text
FROM trajectories WHERE run = '{run}' ORDER BY reward DESC LIMIT 20""",
    "held-out prompts with a wrong response": """SELECT version, prompt_text, answer, response, reward, error
FROM held_out h WHERE evaluation = (SELECT evaluation FROM held_out
    WHERE run = '{run}' ORDER BY step DESC, evaluated_at DESC LIMIT 1) AND NOT passed ORDER BY h.prompt""",
    "reward and staleness by step": """SELECT step, mean_reward, mean_staleness, max_staleness, mean_age_seconds
FROM staleness WHERE run = '{run}' ORDER BY step DESC LIMIT 100""",
    "searchers": """SELECT sender, host, trajectories, errors, mean_reward
FROM clients WHERE run = '{run}' AND role = 'searcher'""",
    "most frequent errors": """SELECT error, COUNT(*) AS trajectories, MAX(id) AS newest
FROM (SELECT id, error FROM trajectories WHERE run = '{run}' ORDER BY received_at DESC LIMIT 20000)
WHERE error IS NOT NULL GROUP BY error ORDER BY trajectories DESC LIMIT 20""",
    "responses used most often": """SELECT c.trajectory, COUNT(*) AS slots, MIN(c.step) AS first_step,
    MAX(c.step) AS last_step, t.reward, t.text
FROM (SELECT trajectory, step FROM consumption WHERE run = '{run}' ORDER BY step DESC LIMIT 20000) c
JOIN trajectories t ON t.id = c.trajectory GROUP BY c.trajectory ORDER BY slots DESC LIMIT 20""",
    "groups without variance of the reward": """SELECT prompt, epoch, visit, trajectories, mean_reward, policy_versions
FROM groups WHERE run = '{run}' AND done_at IS NOT NULL AND reward_variance = 0 LIMIT 100""",
    "waste by step": "SELECT * FROM waste WHERE run = '{run}' ORDER BY step DESC LIMIT 50",
    "use by length of the response": "SELECT * FROM lengths WHERE run = '{run}' ORDER BY least_tokens",
    "evaluations": """SELECT step, version, held_out_prompts, accuracy, accuracy_low, accuracy_high, reward, kl,
    not_measured FROM evaluations WHERE run = '{run}' ORDER BY step""",
}


def built_in(run: Run) -> dict[str, str]:
    """Return the statements of tba by their names."""
    return {name: _filled(text, run) for name, text in _BUILT_IN.items()}


def own(run: Run) -> dict[str, str]:
    """Return the statements of the user by the names of their files, without the ending.

    Files that are not regular, too large or not UTF-8 are left out: a run directory may come from elsewhere, and a
    link in it must not show another file. Nor is `queries` itself a link.
    """
    folder = run.directory / DIRECTORY
    found = [] if folder.is_symlink() else sorted(folder.glob("*.sql"))[:_MOST_FILES]
    texts = {path.stem: _text(path) for path in found if _FILE_NAME.fullmatch(path.name)}
    return {name: _filled(text, run) for name, text in texts.items() if text is not None}


def _text(path: Path) -> str | None:
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            return None
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def _filled(text: str, run: Run) -> str:
    # A quote in the name of a run is doubled in SQL.
    return text.replace("{run}", run.name.replace("'", "''"))
