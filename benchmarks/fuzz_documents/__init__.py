"""Mutations of documents from outside: only clean errors, in bounded time and memory.

``python -m benchmarks.fuzz_documents --count 100000`` changes real documents of every
kind at random, reads each in a worker process as the command line would, and counts
what comes of it. A *clean* error is a MeshwrightError; anything else that is raised
is a traceback for a user. A mutation that takes more than 5 s of a core, or after
which the worker has grown by more than 1 GB, fails as well. Failing inputs are kept.

With ``--guided``, atheris (``pip install atheris``) picks what to mutate by the code
that it reaches.
"""

from benchmarks.fuzz_documents.judging import BAD, OUTCOMES, Worker, judge, prepare
from benchmarks.fuzz_documents.kinds import KINDS, Kind
from benchmarks.fuzz_documents.mutations import mutate

__all__ = ["BAD", "KINDS", "OUTCOMES", "Kind", "Worker", "judge", "mutate", "prepare"]
