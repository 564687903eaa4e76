"""A writer of recipes in a folder of their own, where the command is then "typed"."""

import contextlib
import faulthandler
import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.forks import ADDRESS, ROOT, forked, serving

Write = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    """All workers of a session share one process that forks, and are forked from it themselves."""
    if not hasattr(config, "workerinput"):
        ended, has_workers = contextlib.ExitStack(), bool(config.getoption("tx", None))
        ended.enter_context(serving(at_once=has_workers))
        if has_workers:
            ended.enter_context(forked())
            _compile(config)
        config.add_cleanup(ended.close)


def _compile(config: pytest.Config) -> None:
    """Write the modules of tests with their assertions rewritten, where that is not done, while the process that forks
    imports: each worker would rewrite all of them, which takes ten seconds."""
    for path in [] if sys.dont_write_bytecode else ROOT.glob("tests/**/test_*.py"):
        folder = rewrite.get_cache_dir(path)
        compiled = folder / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(folder):
            status, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, compiled)


gc.disable()  # while everything is imported, of which nothing is garbage


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("fresh_process"):
            patch.delenv(ADDRESS, raising=False)
        return (yield)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[Any]:
    """A fifth after its limit a test that hangs ends the session, with the stacks of all threads: the limit itself is a
    signal, which waits for native code to return, and which a run may take for a reason to save."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(1.2 * settings.timeout, file=stderr, exit=True)
    return (yield)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_cancel_timer() -> Iterator[Any]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """What was imported, and what modules of tests leave behind, stays, so collections need not walk it: a run collects
    after each step that it undoes, which would take twice its time at the end of the suite."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests make is kept in no cache of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_runs() -> Iterator[None]:
    """Nothing waits for the disk, since no test cuts the power; a run writes one token as its sample, git is asked once
    for the commit of a folder, the commands are built once, and seeds of absent cards are not kept, each with the stack
    that it was set from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        if "framework.cli" in sys.modules:
            patch.setattr("typer.main.get_command", cache(import_module("typer.main").get_command))
        if "framework.run.trainer" in sys.modules:
            import torch

            from framework.run.record import revision

            if not torch.cuda.is_available():
                patch.setattr("torch.cuda.random._lazy_call", lambda call, **named: None)
                patch.setattr("torch.xpu.random._lazy_call", lambda call, **named: None)
            patch.setattr("framework.run.trainer.SAMPLE_NEW_TOKENS", 1)
            commit = cache(lambda folder: revision.describe_revision())
            patch.setattr("framework.run.record.run_folder.describe_revision", lambda: commit(os.getcwd()))
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked(_own_caches: None) -> Iterator[None]:
    """Python processes are forked, not started."""
    with forked():
        yield


@pytest.fixture
def write(tmp_path, monkeypatch) -> Write:
    """Writes `text` to `name` in a fresh working directory and returns the relative path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("framework.compose.request.detect", lambda: None)

    def write_file(text: str, name: str = "r.yaml") -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write_file
