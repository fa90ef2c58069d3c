"""Run one function on several ranks, each a process of its own with a gloo world.

    def gathered(rank: int, world_size: int, counts: list[int]) -> list[int]:
        x = torch.full((counts[rank],), rank)
        return all_gather_rows(x, counts, group=dist.group.WORLD).tolist()

    def test_rows_arrive_rank_major() -> None:
        for result in run_ranks(gathered, 2, [1, 2]):
            assert result == [0, 1, 1]

The function stands at the top level of a module (it travels by name), its arguments and its result are pickled. The
default group is there when it starts and gone after it. Importing torch takes a process seconds, so ranks that ran
without an error are kept for the next call of this session: leave no state behind, and rather pass a list of cases to
one call than call once per case.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# How long the other ranks may still report after the first has failed: their errors often name the cause.
GRACE_S = 2.0


class RanksFailed(RuntimeError):
    """A rank raised, died or did not end in time. The message holds what each of them has to say."""


class _Rank:
    """A process that waits for work."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.folder = tempfile.TemporaryDirectory(prefix="rank_")
        self.log = Path(self.folder.name) / "output"
        self.process = context.Process(target=_serve, args=(theirs, str(self.log)), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.folder.cleanup()


_idle: list[_Rank] = []


def _alive() -> _Rank:
    """An idle rank, or a new one; those that died while idle are dropped."""
    while _idle:
        rank = _idle.pop()
        if rank.process.is_alive():
            return rank
        rank.end()
    return _Rank()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call fn(rank, world_size, *args) on every rank and return the results in rank order.

    `timeout` seconds, which is also that of the default group's collectives, is all the time there is: then, and
    when a rank raises or dies, the ranks are killed.

    Raises:
        RanksFailed: with the traceback and the output of each rank.
    """
    deadline = time.monotonic() + timeout
    ranks = [_alive() for _ in range(world_size)]
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rank, process in enumerate(ranks):
            process.connection.send((fn, rank, world_size, args, f"file://{folder}/store", timeout))
        pending = dict(enumerate(ranks))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait([process.connection for process in pending.values()], left)
            for rank, process in list(pending.items()):
                if process.connection not in ready:
                    continue
                del pending[rank]
                try:
                    ok, value = process.connection.recv()
                except EOFError:
                    process.process.join()
                    ok, value = False, f"died with exit code {process.process.exitcode}"
                (results if ok else errors)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in pending:
            errors[rank] = "was still running" if errors else f"was still running after {timeout} s"
        if not errors:
            _idle.extend(ranks)
            return [results[rank] for rank in range(world_size)]
        report = "".join(
            f"\n--- rank {rank} of {world_size}: {error}\n{process.log.read_text(errors='replace')[-4000:]}"
            for rank, process in enumerate(ranks)
            if (error := errors.get(rank)) is not None
        )
        for process in ranks:
            process.end()
    raise RanksFailed(f"{getattr(fn, '__name__', fn)} failed{report}")


def _serve(connection: Connection, log: str) -> None:
    output = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            fn, rank, world_size, args, store, timeout = connection.recv()
        except EOFError:
            return
        os.ftruncate(output, 0)
        try:
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
            try:
                # A rank that is done before another has connected would break the other's connecting.
                dist.barrier()
                answer = True, fn(rank, world_size, *args)
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
