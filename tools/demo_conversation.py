"""The conversation that the demo holds: a coding agent is asked to review a file.

Fixed text, so that every run asks for the same computation. What a coding agent sends looks like this: long
instructions and tool descriptions that never change, a file, and a short question at the end.
"""

from __future__ import annotations

__all__ = ["MAX_PROMPT_TOKENS", "MIN_PROMPT_TOKENS", "Message", "appended_turn", "branch", "first_request"]

Message = dict[str, str]

MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 2600, 3000
"""What the first request must come to with the model's tokenizer: more than one chunk of 2,048 tokens."""

_SYSTEM = """\
You are a careful coding agent that works in a terminal beside an engineer. You read code, find what is wrong with it, \
propose the smallest change that puts it right, and say how the change can be verified. You never invent the contents \
of a file that you have not read, and you never claim that a test passed unless you ran it.

# How you work

1. Read before you write. Open every file that a change touches, and the tests beside it, before you propose anything.
2. Keep changes small. One concern per change; no drive-by renames, no reformatting of lines that you did not need to \
touch, no new dependency without a reason that you can state in one sentence.
3. Cite what you talk about as `path:line`. A finding without a location is an opinion.
4. Rank findings by what they can do to a user: lost or wrong data first, then hangs and crashes, then leaks, then \
slowness, and style last. Leave style out altogether unless you were asked for it.
5. Say how sure you are. Write "certain" only where you can name an input, or an order of events, that shows the \
failure. Otherwise write "likely", and say what would settle the question.
6. Stop when you are done. Do not repeat the task, do not praise the code, and do not end by offering more help.

# Tools

You may call one tool at a time. Wait for its result before you call another one.

## read_file
Reads a text file of the working tree.
- path (string, required): relative to the root of the repository. Paths that lead out of it are refused.
- first_line (integer, default 1): where to start. Lines are counted from one.
- last_line (integer, default: the end of the file): where to stop, this line included.
Returns the lines with their numbers. Files of more than two mebibytes must be read in parts.

## search
Looks for a regular expression in all tracked files.
- pattern (string, required): in the syntax of Python's re module; case matters unless it begins with (?i).
- glob (string, optional): only files whose path matches, such as `src/**/*.py`.
- limit (integer, default 50): the number of matches after which the search stops.
Returns one match a line as `path:line: text`. A search that stopped at the limit says so in its last line.

## list_files
Lists what lies in a folder, with sizes and times of change.
- path (string, default `.`): relative to the root of the repository.
- depth (integer, default 1, at most 4): how many levels of folders to descend.
Returns one entry a line, folders first. What the repository ignores is left out.

## git_diff
Shows what a branch changes.
- base (string, default: the main branch): the commit to compare with.
- path (string, optional): only this file or folder.
Returns a unified diff with ten lines of context. Binary files are named and not shown.

## edit_file
Replaces one exact piece of text in a file by another one.
- path (string, required): the file, which must have been read in this conversation.
- old (string, required): the text to replace, with enough lines around it to occur exactly once.
- new (string, required): what to put in its place. An empty string deletes the old text.
Returns the changed lines, or a sentence that tells why nothing was changed.

## run_command
Runs a command in the root of the repository, without a terminal and without network access.
- argv (list of strings, required): the program and its arguments; no shell interprets them.
- timeout_seconds (integer, default 120, at most 900): the command is killed after this time.
Returns the exit code and the last 200 lines of its output. Ask before you run anything that deletes files, rewrites \
history, or takes longer than a minute.

## note
Keeps a sentence for later turns of this conversation.
- text (string, required): what to remember, in the words of the engineer where possible.

# Form of a review

Begin with one sentence that says whether the change is safe to merge. Then give the findings as a numbered list, the \
gravest first. Each has a location, the failure in one or two sentences, the order of events or the input that leads \
to it, and the smallest repair. Close with the tests that you would add, one line each. Write plain English, without \
headings, tables or emphasis. If there is nothing to find, say so in one sentence and stop.
"""

# The faults in it are there on purpose.
_FILE = '''\
"""A queue of jobs in one SQLite file, shared by several worker processes."""

import json
import os
import sqlite3
import threading
import time
import traceback

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    payload TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'ready',
    attempts INTEGER NOT NULL DEFAULT 0,
    run_after REAL NOT NULL DEFAULT 0,
    leased_until REAL,
    error TEXT
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, run_after);
"""

MAX_ATTEMPTS = 5
LEASE_SECONDS = 60
BACKOFF_SECONDS = (1, 5, 30, 120)


class JobQueue:
    """Add jobs, and take them one at a time."""

    def __init__(self, path, clock=time.time):
        self.path = path
        self.clock = clock
        self.connection = sqlite3.connect(path, check_same_thread=False)
        self.connection.row_factory = sqlite3.Row
        self.connection.executescript(SCHEMA)
        self.handlers = {}

    def add(self, kind, payload, delay=0, handlers=[]):
        """Queue a job and return its number."""
        cursor = self.connection.execute(
            "INSERT INTO jobs (kind, payload, run_after) VALUES (?, ?, ?)",
            (kind, json.dumps(payload), self.clock() + delay),
        )
        self.connection.commit()
        for handler in handlers:
            self.handlers[kind] = handler
        return cursor.lastrowid

    def take(self):
        """Lease the oldest job that may run now, or return None."""
        now = self.clock()
        row = self.connection.execute(
            "SELECT * FROM jobs WHERE state = 'ready' AND run_after <= ? "
            "ORDER BY run_after LIMIT 1",
            (now,),
        ).fetchone()
        if row is None:
            return None
        self.connection.execute(
            "UPDATE jobs SET state = 'running', leased_until = ?, attempts = attempts + 1 "
            "WHERE id = ?",
            (now + LEASE_SECONDS, row["id"]),
        )
        self.connection.commit()
        return dict(row)

    def finish(self, job):
        """Forget a job that is done."""
        self.connection.execute("DELETE FROM jobs WHERE id = ?", (job["id"],))

    def fail(self, job, error):
        """Try a job again later, or give it up after too many attempts."""
        attempts = job["attempts"]
        if attempts >= MAX_ATTEMPTS:
            state, run_after = "dead", job["run_after"]
        else:
            state = "ready"
            run_after = self.clock() + BACKOFF_SECONDS[attempts]
        self.connection.execute(
            "UPDATE jobs SET state = ?, run_after = ?, leased_until = NULL, error = ? "
            "WHERE id = ?",
            (state, run_after, str(error), job["id"]),
        )
        self.connection.commit()

    def recover(self):
        """Make jobs ready again whose worker is gone."""
        self.connection.execute(
            "UPDATE jobs SET state = 'ready', leased_until = NULL "
            f"WHERE state = 'running' AND leased_until < {self.clock()}"
        )
        self.connection.commit()

    def export(self, path):
        """Write all jobs that were given up to a file, and forget them."""
        rows = self.connection.execute("SELECT * FROM jobs WHERE state = 'dead'").fetchall()
        self.connection.execute("DELETE FROM jobs WHERE state = 'dead'")
        self.connection.commit()
        with open(path, "w") as file:
            for row in rows:
                file.write(json.dumps(dict(row)) + "\\n")
        os.rename(path, path + ".done")


class Worker(threading.Thread):
    """Runs jobs until it is told to stop."""

    def __init__(self, queue, idle_seconds=0.5):
        super().__init__(daemon=True)
        self.queue = queue
        self.idle_seconds = idle_seconds
        self.stopping = False

    def run(self):
        while not self.stopping:
            self.queue.recover()
            job = self.queue.take()
            if job is None:
                time.sleep(self.idle_seconds)
                continue
            handler = self.queue.handlers[job["kind"]]
            try:
                handler(json.loads(job["payload"]))
            except Exception as error:
                traceback.print_exc()
                self.queue.fail(job, error)
            finally:
                self.queue.finish(job)

    def stop(self):
        self.stopping = True
        self.join(timeout=LEASE_SECONDS)
'''

_TESTS = """\
from jobs.queue import BACKOFF_SECONDS, MAX_ATTEMPTS, JobQueue


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_jobs_come_out_in_order(tmp_path):
    queue = JobQueue(tmp_path / "jobs.db")
    numbers = [queue.add("mail", {"to": name}) for name in ("ann", "bob", "cy")]
    assert [queue.take()["id"] for _ in numbers] == numbers
    assert queue.take() is None


def test_a_failed_job_waits_before_it_runs_again(tmp_path):
    clock = Clock()
    queue = JobQueue(tmp_path / "jobs.db", clock)
    queue.add("mail", {"to": "ann"})
    queue.fail(queue.take(), "no route")
    assert queue.take() is None
    clock.now += BACKOFF_SECONDS[0] + 1
    assert queue.take()["attempts"] == 1


def test_a_lease_runs_out(tmp_path):
    clock = Clock()
    queue = JobQueue(tmp_path / "jobs.db", clock)
    number = queue.add("mail", {"to": "ann"})
    queue.take()
    clock.now += 61
    queue.recover()
    assert queue.take()["id"] == number
"""

_PRESENT = """\
This is `jobs/queue.py` from the branch `durable-jobs`. Four worker processes will share one file, each with two \
`Worker` threads; the file lies on a local disk. Handlers may take up to ten minutes, and none of them may be run \
twice for the same job unless its worker died. Please read it now. I will ask about it in a moment.

```python
"""
_BETWEEN = """\
```

These are all the tests that it has, `tests/test_queue.py`:

```python
"""

_READ = """\
I have read jobs/queue.py and its tests. The places that matter for your rules are `take`, where a job is selected in \
one statement and leased in another, `recover`, which every worker calls in every round, and the `finally` branch of \
`Worker.run`. The tests use one queue in one process, and I have not seen the handlers.\
"""

# Chosen so that the model is never in two minds about a word of its answer (the second best is 0.5 or more behind in
# log-probability each time): last-digit differences, between one BLAS and another or between a prefill of 700 tokens
# and one of a single token, must not look like a broken cache.
_QUESTION = """\
Please list the methods of `JobQueue` that write to the database, and say for each one what can go wrong when two \
processes call it at once.\
"""

_FOLLOW_UP = """\
Agreed. Now write the new body of `take` so that two processes can never lease the same job. Use one statement, keep \
the signature, and say which version of SQLite it needs.\
"""

_OTHER_QUESTION = """\
Before you review it: explain to a new colleague, in three sentences and without code, what happens to a job between \
`add` and `finish`, and which process decides that it has failed.\
"""


def first_request() -> list[Message]:
    """What every case but two sends."""
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"{_PRESENT}{_FILE}{_BETWEEN}{_TESTS}```"},
        {"role": "assistant", "content": _READ},
        {"role": "user", "content": _QUESTION},
    ]


def appended_turn(answer: str) -> list[Message]:
    """The first request with its answer, and the next question."""
    return [
        *first_request(),
        {"role": "assistant", "content": answer},
        {"role": "user", "content": _FOLLOW_UP},
    ]


def branch() -> list[Message]:
    """The first request with another last message."""
    return [*first_request()[:-1], {"role": "user", "content": _OTHER_QUESTION}]
