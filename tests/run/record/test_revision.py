"""The commit of the working directory is recorded, and no program that the repository names runs."""

import os
import subprocess
from pathlib import Path

import pytest

from framework.run.record.revision import describe_revision


def git(*arguments: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(["git", *name, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    git("init")
    Path("a.txt").write_text("one\n")
    git("add", ".")
    git("commit", "-m", "one")
    return Path.cwd()


def test_the_commit_is_recorded_and_whether_files_differ(repository, monkeypatch):
    head = git("rev-parse", "HEAD")
    assert describe_revision() == head
    os.utime("a.txt", (1, 1))  # touched, and the same
    assert describe_revision() == head
    Path("a.txt").write_text("two\n")
    assert describe_revision() == f"{head}-dirty"
    (repository / "inner").mkdir()
    monkeypatch.chdir("inner")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert describe_revision() == f"{head}-dirty"


def test_a_second_work_tree_has_its_own_commit(repository, monkeypatch):
    git("worktree", "add", "../second")
    monkeypatch.chdir("../second")
    Path("b.txt").write_text("b\n")
    git("add", ".")
    git("commit", "-m", "two")
    assert describe_revision() == git("rev-parse", "HEAD")


def test_there_is_none_outside_of_a_repository_or_before_the_first_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert describe_revision() is None
    git("init")
    assert describe_revision() is None


def test_no_program_of_the_repository_runs(repository):
    mark = repository / "mark"
    program = repository / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    program.chmod(0o755)
    Path("hooks").mkdir()
    (Path("hooks") / "post-index-change").symlink_to(program)
    settings = {"core.fsmonitor": program, "core.hooksPath": Path("hooks").absolute(), "filter.x.clean": program}
    for key, value in {**settings, "diff.external": program, "core.pager": program}.items():
        git("config", key, str(value))
    for file in (Path(".gitattributes"), Path(".git/info/attributes")):
        file.parent.mkdir(exist_ok=True)
        file.write_text("* filter=x\n")
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    os.utime("a.txt", (1, 1))
    mark.unlink(missing_ok=True)
    assert describe_revision() == head
    assert not mark.exists()
    git("describe", "--always", "--dirty")  # as it was asked for before
    assert mark.exists()
