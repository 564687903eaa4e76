"""Mutated recipes: each is accepted or refused with located problems, in time and in bounded memory."""

import copy
import random
import resource
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.checks import check_request
from framework.compose.shipped import recipes
from framework.schema.keys import every_key
from tests.faults.commands import changes, in_time, run
from tests.faults.profile import drawn, throws

GROWTH_KIB = 512 * 1024
"""Resident memory that all of them together may add; one alias bomb, expanded, would need more."""
ROOT = Path(__file__).parents[2]
TEXTS = [path.read_text() for path in recipes().values()]


def edit_key(text: str, dice: random.Random) -> str:
    """Change one letter of one line's key."""
    lines = text.splitlines()
    index = dice.randrange(len(lines))
    at = dice.randrange(max(len(lines[index].partition(":")[0]), 1))
    letter = dice.choice(string.ascii_letters + "-_.:#'\"[{}]&*!|>%@`\t ")
    lines[index] = lines[index][:at] + letter + lines[index][at + dice.randrange(2) :]
    return "\n".join(lines)


# fmt: off
WRONG = [
    "yes", "no", "on", "off", "null", "~", "true", "1e5x", "1e-5", "-1", "0", "1.5", ".inf", ".nan", "9e999", "[]",
    "{}", "[a,b]", "[[1]]", "{a:{b:c}}", "{append:[x]}", "{append:1}", "''", '"\'auto\'"', "auto",
    "${training.seed}", "${oc.env:HOME}", "${training}", "${x", "???", "!!python/object:os.system", "!!binary&a",
    "*a", "<<:*a", "|x", "2024-01-01", "0x10", "0o7", "1_000", "\\ud800", "\u202e", "\ufeff", "00:00:01", "@x", "`x",
    "%x", "?", "-", "---", "...", "_target_", "hydra:", "'os.system'", "../../etc/passwd",
    "9" * 50, "9" * 5000, "x" * 50_000, "a " * 5000, "${a}" * 500, "[" * 60 + "]" * 60, "'", '"', "[", "{",
]
# fmt: on


def swap_value(text: str, dice: random.Random) -> str:
    """Give one key a value of another type."""
    lines = [line for line in text.splitlines() if ":" in line]
    line = dice.choice(lines)
    return text.replace(line, f"{line.partition(':')[0]}: {dice.choice(WRONG)}")


def add_key(text: str, dice: random.Random) -> str:
    """Add some key of the schema, or a made-up one, with some value."""
    key = dice.choice([*every_key(), "hydra.run.dir", "_target_", "defaults", "model.architecture.x.y", "a.b.c.d"])
    *sections, name = key.split(".")
    nested = "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
    return f"{text}\n{nested}{'  ' * len(sections)}{name}: {dice.choice(WRONG)}\n"


def delete(text: str, dice: random.Random) -> str:
    """Remove a stretch of text."""
    start = dice.randrange(len(text))
    return text[:start] + text[start + dice.randrange(60) :]


def shuffle(text: str, dice: random.Random) -> str:
    """Change the order or the indentation of lines."""
    lines = text.splitlines()
    if dice.random() < 0.5:
        dice.shuffle(lines)
    else:
        lines = [" " * dice.randrange(4) + line if dice.random() < 0.1 else line for line in lines]
    return "\n".join(lines)


def nest(text: str, dice: random.Random) -> str:
    """Add something deep, wide or recursive."""
    depth = dice.choice([10, 30, 300, 30_000])
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    return text + dice.choice(
        [
            f"\nmodel: {'{a: ' * depth}\n",
            f"\nx: {'[' * depth}{']' * depth}\n",
            "\n" + "".join(f"{'  ' * level}k:\n" for level in range(min(depth, 500))),
            "\n" + bomb,
            "\nself: &s {s: *s}\n",
            "\nmodel:\n  architecture:\n" + "".join(f"    k{i}: {i}\n" for i in range(min(depth, 5000))),
            "\ntraining: {" + ", ".join(f"k{i}: {i}" for i in range(min(depth, 5000))) + "}\n",
            "\n---\n" + text,
        ]
    )


def encode(text: str, dice: random.Random) -> bytes:
    """Write it in another encoding, or with bytes that are none."""
    data = bytearray(text.encode(dice.choice(["utf-8", "utf-16", "utf-32", "utf-8-sig", "latin-1"]), "replace"))
    for _ in range(dice.randrange(3)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)


MUTATIONS = (edit_key, swap_value, add_key, delete, shuffle, nest)
# fmt: off
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**70, 1.5, 1e-5, 1e300,
    "", "auto", "none", "bf16", "yes", "1e-5", "1e5x", "???", "${training.seed}", "${oc.env:HOME}", "${nope}",
    "gone.jsonl", "./gone", "h100_80gb", "eager", "x" * 9000,
    [], {}, ["a"], [1], [["a"]], [{"path": "a"}], [{"pth": "a"}],
    {"append": ["a"]}, {"append": 3}, {"model_type": "llama"},
]
# fmt: on


def some_value(dice: random.Random) -> Any:
    """One of VALUES, as a copy: a later change of the same recipe may go inside it."""
    return copy.deepcopy(dice.choice(VALUES))


def change_tree(tree: dict[str, Any], dice: random.Random) -> None:
    """Rename, replace, remove or add one key somewhere in a recipe that stays good YAML."""
    here, key = tree, dice.choice(list(tree))
    while isinstance(here[key], dict) and here[key] and dice.random() < 0.8:
        here, key = here[key], dice.choice(list(here[key]))
    action = dice.randrange(4)
    if action == 0:
        at = dice.randrange(len(key) + 1)  # it may be empty by now
        here[key[:at] + dice.choice(["", "_", "-", "x", "."]) + key[at + 1 :]] = here.pop(key)
    elif action == 1:
        here[key] = some_value(dice)
    elif action == 2 and len(here) > 1:
        del here[key]
    else:
        section, _, name = dice.choice([word for word in every_key() if "." in word]).partition(".")
        branch = tree.setdefault(section, {})
        if isinstance(branch, dict):
            branch[name] = some_value(dice)


def mutated(dice: random.Random) -> bytes:
    text = dice.choice(TEXTS)
    if dice.random() < 0.5:
        tree = yaml.safe_load(text)
        for _ in range(dice.randrange(1, 6)):
            change_tree(tree, dice)
        return yaml.safe_dump(tree).encode()
    for _ in range(dice.randrange(1, 4)):
        text = dice.choice(MUTATIONS)(text, dice)
    return encode(text, dice) if dice.random() < 0.15 else text.encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("recipes"))
        patch.setattr("framework.compose.request.detect", lambda: None)
        yield Path("mutant.yaml")


@drawn(12, 14_000)
def test_a_mutated_recipe_is_accepted_or_each_problem_has_its_place(file, dice):
    file.write_bytes(mutated(dice))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with in_time(), changes() as changed:
        report = check_request(file)
    for problem in report.problems:
        assert problem.message
        assert problem.where or problem.key in WHOLE_REQUEST, problem
    assert not changed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB


WHOLE_REQUEST = {"model.model_name", "model.load_pretrained_weights", "training.eval_steps"}
"""Keys whose absence is the problem, so that there is no line to point to."""


@drawn(5, 1000)
def test_a_mutated_recipe_is_shown_and_planned_for_or_refused(file, dice):
    file.write_bytes(mutated(dice))
    run(
        *dice.choice(
            [
                ("show", "mutant.yaml", "--origin"),
                ("convert", "mutant.yaml"),
                ("diff", "mutant.yaml", "mutant.yaml", "--json"),
            ]
        )
    )


@pytest.mark.parametrize("number", throws(1, 30, "the real command"))
def test_some_of_them_through_the_real_command(tmp_path, number):
    (tmp_path / "mutant.yaml").write_bytes(mutated(random.Random(number)))
    command = [sys.executable, "-m", "framework", "check", "mutant.yaml", "--quick"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60, check=False
    )
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert (done.returncode == 2) == ("error" in done.stderr)
