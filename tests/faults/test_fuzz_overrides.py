"""Words of the command line, drawn from keys, groups, values and signs: each is obeyed or refused."""

import json
from pathlib import Path

import pytest

from framework.compose.shipped import GROUPS, presets
from framework.schema.keys import every_key
from tests.faults.commands import run
from tests.faults.profile import drawn
from tests.tiny import LLAMA

RECIPE = {
    "training": {"max_steps": 4, "learning_rate": 1e-2},
    "model": {"architecture": LLAMA, "load_pretrained_weights": False, "tokenizer_name": "./nowhere"},
    "data": {"train": [{"path": "rows.jsonl"}]},
}
# fmt: off
VALUES = [
    "", "x", "1", "-1", "1e999", "nan", "null", "true", "[a,b]", "{a: b}", "a,b", "a=b", "a#b", "'", '"', "[", "{",
    "${training.seed}", "${x", "${oc.env:HOME}", "9" * 50, "\u0663", "\u00b2", "\x00", "\x1b[31m", "\u202e", "\ud800",
    "auto", "1_0", "0x1", "range(1,3)", "choice(a,b)", "glob(*)", "[[1]]", "{append:[x]}", "~", "???", ".", "../..",
    "/dev/stdin", "x" * 5000, "[" * 300,
]
KEYS = [
    *every_key(), *GROUPS, "hydra.run.dir", "hydra.launcher", "3", "training.3", "data.train[0].path", "data.train.0",
    "a.b", "", "=", "[0]", "training..seed", "training.seed[99999]", "training", "defaults", "schema_version",
]
VERBS = [
    ("check", "base.yaml", "--quick"), ("show", "base.yaml"), ("show", "base.yaml", "--origin"),
    ("show", "base.yaml", "--json"), ("diff", "base.yaml", "base.yaml"), ("levers",), ("list",),
    ("check", "base.yaml", "--quick", "--json", "--nproc", "2"), ("explain",), ("report",), ("convert", "base.yaml"),
]
# fmt: on


@pytest.fixture(scope="module", autouse=True)
def _place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("words"))
        patch.setattr("framework.compose.request.detect", lambda: None)
        Path("base.yaml").write_text(json.dumps(RECIPE))
        yield


def word(dice):
    value = dice.choice([*VALUES, *(name for group in GROUPS for name in [*presets(group)][:3])])
    key = dice.choice(KEYS)
    if dice.random() < 0.1:
        return dice.choice([value, key, "--json", "--nproc", f"--{key}", "-", "--"])
    return dice.choice(["", "", "", "+", "~", "++", "~~"]) + key + dice.choice(["=", "=", "=", "+=", "", "=="]) + value


@drawn(15, 15_000)
def test_any_arguments_are_obeyed_or_refused(dice):
    verb = dice.choice(VERBS)
    arguments = [word(dice) for _ in range(1 if len(verb) == 1 else dice.randrange(1, 4))]
    run(*verb, *arguments)


LONG = "x" * 300
PLACES = [
    *(("report", LONG), ("explain", LONG), ("predict", LONG, "rows.jsonl"), ("merge", LONG), ("convert", LONG)),
    *(
        ("predict", ".", LONG),
        ("show", LONG),
        ("show", f"{LONG}.yaml"),
        ("diff", LONG, LONG),
        ("show", f"./{LONG}/a.yaml"),
    ),
    *(
        ("report", ".", "--output", LONG),
        ("explain", "base.yaml", "--run", LONG),
        ("plan", "base.yaml", "--html", LONG),
    ),
    *(("check", "base.yaml", f"model.model_name={LONG}"), ("check", "base.yaml", f"training.output_dir={LONG}")),
    *(("check", "base.yaml", f"data.train=[{{path: {LONG}}}]"), ("data", "base.yaml", f"model.chat_template={LONG}")),
]


@pytest.mark.parametrize("arguments", PLACES, ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"))
def test_a_name_that_is_too_long_for_a_file_is_refused(arguments):
    run(*arguments, codes=(2,))
