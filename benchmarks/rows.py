"""Rows measured in separate processes, forked from one that has imported torch and transformers but not started CUDA.

Packages that start CUDA on import (bitsandbytes) are imported only by the forked process: CUDA cannot be used after a
fork once it was started.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = "benchmarks.preloaded"
Row = Mapping[str, Any]
Measure = Callable[[Row], dict[str, Any]]
"""Function that measures one row in a process with the variables of torchrun (RANK, WORLD_SIZE, ...); importable by
name."""


@dataclass(frozen=True)
class Queue:
    """Cards of a group of ranks, one process each, and the threads of each."""

    cards: tuple[int, ...]
    threads: int = 4


def run_rows(
    rows: Sequence[Row],
    measure: Measure,
    out: Path,
    queues: Sequence[Queue],
    *,
    seconds: float,
    kept: int = 1,
    total: float = float("inf"),
) -> None:
    """Append a line of JSON to `out` for each row as soon as it is measured: the row's name, its figures or `error`,
    and the seconds that it took. Queues take rows in turn.

    A row that takes longer than `seconds` is ended, and all are after `total` seconds. A group of processes measures up
    to `kept` rows, one after the other, unless one fails.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() must not start CUDA in the server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    waiting, lock, end = list(rows), threading.Lock(), time.monotonic() + total

    def take(count: int) -> list[Row]:
        with lock:
            taken = waiting[:count]
            del waiting[:count]
            return taken

    def write(row: Row, document: dict[str, Any], begun: float) -> None:
        document = {"name": row["name"], **document, "seconds": round(time.monotonic() - begun, 1)}
        with lock, out.open("a") as file:
            file.write(json.dumps(document) + "\n")
        print(row["name"], document["seconds"], document.get("error", ""), flush=True)

    def work(queue: Queue) -> None:
        left = take(kept)
        while left and time.monotonic() < end:
            left = left[_group(context, queue, left, measure, write, seconds, end) :] or take(kept)

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _group(
    context: Any,
    queue: Queue,
    rows: Sequence[Row],
    measure: Measure,
    write: Callable[..., None],
    seconds: float,
    end: float,
) -> int:
    """Measure rows in one group of processes. Returns the number of rows completed, including the failed one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank, card in enumerate(queue.cards):
        receive, send = context.Pipe(duplex=False)
        variables = {"CUDA_VISIBLE_DEVICES": str(card)} if len(queue.cards) == 1 else {}
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(queue.cards))}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(queue.threads)}
        processes.append(context.Process(target=_serve, args=(rows, measure, variables, send)))
        processes[-1].start()
        send.close()
        pipes.append(receive)
    done = 0
    try:
        for row in rows:
            begun = time.monotonic()
            document = _found(pipes, min(end, begun + seconds))
            write(row, document, begun)
            done += 1
            if "error" in document:
                break
    finally:
        for process in processes:
            process.join(0 if "error" in document else 10)
            process.kill()
    return done


def _found(pipes: Sequence[Connection], end: float) -> dict[str, Any]:
    """The first rank's result once all have measured the row; else the error of the first that failed."""
    found: dict[Any, dict[str, Any]] = {}
    while len(found) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in found], timeout=max(0, end - time.monotonic()))
        if not ready:
            return {"error": "timed out"}
        for pipe in ready:
            try:
                found[pipe] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                found[pipe] = {"error": "the process died"}
            if "error" in found[pipe]:
                return found[pipe]
    return found[pipes[0]]


def _serve(rows: Sequence[Row], measure: Measure, variables: Mapping[str, str], send: Connection) -> None:
    os.environ |= variables
    faulthandler.register(signal.SIGUSR1)  # says where a row hangs
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    for row in rows:
        try:
            send.send(measure(row))
        except BaseException as error:
            import traceback

            traceback.print_exc(limit=-8)
            send.send({"error": f"{type(error).__name__}: {str(error)[:600]}"})
            return
