"""No text of a file, a name or a library steers the terminal or reorders what is read; JSON and YAML mean the same."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from rich.text import Text

from framework.cli import main
from framework.cli.printing import print_columns, print_json, print_problems
from framework.compose import compose
from framework.console import TerminalConsole, folded
from framework.converters import convert
from framework.errors import Problem
from framework.escaping import escape
from framework.reports.rows import format_classes
from framework.terminal import OBEYED, VisibleStream, on_one_line, visible, visible_streams
from framework.text import dump

ROOT = Path(__file__).parents[1]
ODD = "\x1b]52;c;eA==\x07\x9b31m\u202egnp\u2066\r\x7f\u2028"
YAML_ODD = "".join(f"\\u{ord(each):04x}" for each in ODD)
"""The same inside double quotes of YAML."""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(write, capsys):
    """Runs a command; its exit code and all that it printed, which steers no terminal."""

    def run_command(*arguments: str) -> tuple[int, str]:
        code = main([*arguments])
        found = capsys.readouterr()
        printed = found.out + found.err
        assert code in (0, 2), printed
        assert not OBEYED.search(printed), repr(printed)
        return code, printed

    return run_command


def test_characters_that_are_obeyed_are_shown_and_no_others():
    kept = "a\tb\nc é ü \u4e2d \u200d \U0001f600 \\x1b \u00a0"
    assert visible(kept) == kept
    obeyed = [*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F)]
    for code in (*obeyed, *range(0x2066, 0x206A), 0xD800, 0xDFFF):
        assert visible(f"a{chr(code)}b") == f"a\\u{code:04x}b"
    assert on_one_line("a\nb\x1b") == "a\\nb\\u001b"


def test_json_and_yaml_mean_the_same_afterwards():
    text = f"{ODD}\\ {{x}}: # é\nline"
    for ascii_only in (True, False):
        assert json.loads(visible(json.dumps({text: text}, ensure_ascii=ascii_only))) == {text: text}
    written = dump({text: [text, "plain", "\\u001b"]})
    assert not OBEYED.search(written)
    assert yaml.safe_load(written) == {text: [text, "plain", "\\u001b"]}


def test_a_config_with_odd_values_reads_back(write):
    recipe = write(f'training: {{run_name: "{YAML_ODD}"}}\nmodel: {{model_name: "a{YAML_ODD}"}}\n')
    config = compose(recipe).config
    assert config.model.model_name == f"a{ODD}"
    again = write(dump(config.model_dump()), "again.yaml")
    assert "\x1b" not in again.read_text()
    assert compose(again).config == config


@pytest.mark.parametrize("verb", ["show", "check", "plan", "convert", "data", "train"])
def test_names_in_a_recipe(run, write, verb):
    write(f'"{YAML_ODD}": 1\ntraining: {{"a{YAML_ODD}\\nerror fake": "b{YAML_ODD}", optimizer: "{YAML_ODD}"}}\n')
    code, printed = run(verb, "r.yaml")
    assert code == 2
    assert ("\\u001b]52" in printed) == (verb != "convert")
    assert not any(line.startswith("error fake") for line in printed.splitlines())


def test_arguments_of_the_command_line_and_names_of_files(run, write):
    name = f"n{ODD}\nerror fake.yaml".replace("/", "")
    write("training: {seed: 1}\n", name)
    assert "\\u202e" in run("show", name, f"training.{ODD.replace('=', '')}=1")[1]
    _, printed = run("show", name, "--origin", f"training.run_name='{ODD}'", "training.trackers=[]")
    assert yaml.safe_load(printed)["training"]["run_name"] == ODD
    for arguments in (
        ["diff", name, name, f"training.run_name={ODD}"],
        ["list", ODD],
        ["levers", ODD],
        ["explain", ODD],
        ["report", ODD],
        ["show", "quickstart", f"--{ODD}"],
        [ODD],
    ):
        assert "error fake" not in run(*arguments)[1].splitlines()


def test_a_difference_is_a_table_of_one_line_a_value(run, write):
    write(f'training: {{run_name: "{YAML_ODD}\\nx"}}\n', "a.yaml")
    write("training: {run_name: y}\n", "b.yaml")
    assert len(run("diff", "a.yaml", "b.yaml")[1].splitlines()) == 2
    document = json.loads(run("diff", "a.yaml", "b.yaml", "--json")[1])
    assert document["differences"][0]["a"] == f"{ODD}\nx"


def test_a_log_that_is_explained(run, write):
    Path("run.log").write_text(
        f"{ODD}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB {ODD}. GPU 0 has a total "
        f"capacity of 23.99 GiB of which 1.00 GiB is free.\nProcess {ODD} has 20.00 GiB memory in use.\n"
    )
    code, printed = run("explain", "run.log")
    assert code == 0
    assert "out of memory" in printed
    assert json.loads(run("explain", "run.log", "--json")[1])["kind"] == "out_of_memory"


def test_another_tools_recipe(run, write):
    write(
        f'base_model: "m{YAML_ODD}"\ndatasets: [{{path: "d{YAML_ODD}\\nmodel: x", type: alpaca}}]\n'
        f'adapter: lora\noptimizer: "o{YAML_ODD}\\nfake: 1"\nlora_r: 8\nsequence_len: 64\n'
    )
    assert run("convert", "r.yaml")[0] == 0
    recipe = convert(Path("r.yaml")).recipe
    assert not OBEYED.search(recipe)
    read = yaml.safe_load(recipe)
    assert set(read) <= {"schema_version", "model", "data", "peft", "training"}
    assert read["model"]["model_name"] == f"m{ODD}"
    assert read["data"]["train"][0]["path"] == f"d{ODD}\nmodel: x"


def test_tables_and_problems_and_documents(capsys):
    with visible_streams():
        print_columns([("a", f"b{ODD}\nx"), ("c", "d")])
        print_problems([Problem(f"k{ODD}\nerror y", f"m\n{ODD}", f"w{ODD}", f"e{ODD}", f"n{ODD}")])
        print_json({f"{ODD}": f"{ODD}\n"})
        print(ODD, file=sys.stderr)
        sys.stdout.writelines([ODD, "\n"])
    found = capsys.readouterr()
    assert not OBEYED.search(found.out + found.err)
    assert len(found.out.splitlines()) == 4
    assert json.loads(found.out.splitlines()[2])[ODD] == f"{ODD}\n"
    assert found.err.splitlines()[1].startswith("  at w\\u001b")
    assert sys.stdout is not None
    assert not isinstance(sys.stdout, VisibleStream)


def test_on_a_terminal_styles_of_ours_are_obeyed_and_texts_are_not(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = TerminalConsole(file=stream, force_terminal=True, soft_wrap=True, highlight=False)
    console.print(f"[red]x{ODD}[/] \x1b[31my")
    printed = stream.getvalue()
    assert visible(f"x{ODD}") in printed
    assert "\\u001b[31my" in printed
    assert printed.startswith("\x1b[31m")
    assert not OBEYED.search(re.sub(r"\x1b\[\d+m", "", printed))


def test_on_a_terminal_bars_and_colors_of_libraries_pass_and_nothing_else_does():
    stream = Terminal()
    wrapped = VisibleStream(stream)
    for text in ("\r 50%|##  | 1/2", "\n\n", "\x1b[A\x1b[A", "\x1b[1;31mred\x1b[0m"):
        stream.seek(0)
        stream.truncate()
        assert wrapped.write(text) == len(text)
        assert stream.getvalue() == text
    for text in ("x\ry", "x\x1b[2J", "\x1b]52;c;eA==\x07", "\x1b[A\x1b[Ax", "\u202e", "\x9b31m"):
        stream.seek(0)
        stream.truncate()
        wrapped.write(text)
        assert stream.getvalue() == visible(text)
    assert wrapped.isatty()


def test_pages_show_them_too():
    assert escape(f'<b title="{ODD}">') == f"&lt;b title=&quot;{visible(ODD)}&quot;&gt;"
    assert not OBEYED.search(format_classes({ODD: 3}))
    users = [
        file for file in (ROOT / "framework").rglob("*.py") if re.search(r"import html\b|html import", file.read_text())
    ]
    assert [str(file.relative_to(ROOT)) for file in users] == ["framework/escaping.py"]


def test_only_one_module_prints_results_and_one_makes_consoles():
    printing = re.compile(r"(?<![\w.])print\(|(?<!Terminal)\bConsole\((?!width)")
    users = {
        str(file.relative_to(ROOT / "framework"))
        for room in ("cli", "report", "compose", "memory", "schema", "build", "convert")
        for file in (ROOT / "framework" / room).rglob("*.py")
        if printing.search(file.read_text())
    }
    assert users == {"cli/printing.py"}


def test_lines_are_folded_between_words_and_a_long_word_stays_whole():
    path = "/a/" + "b" * 30
    text = Text(f"  one two three four\n{path} ends\nx")
    text.stylize("bold", 2, 5)
    found = folded(text, 12)
    assert found.plain.split("\n") == ["  one two", "  three four", path, "ends", "x"]
    assert [(span.start, span.end) for span in found.spans if span.style == "bold"] == [(2, 5)]


def test_a_command_stays_whole():
    command = "  tunesmith train runs/mine/config.yaml training.learning_rate=1e-4 --resume"
    assert folded(Text(command), 40).plain == command
