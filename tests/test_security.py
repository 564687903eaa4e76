"""SECURITY.md: each promise names tests that are there; and the promises that no other file tests."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError

from framework.build.text.chat import Chat, render
from framework.cli import main
from framework.errors import RequestError

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())


def test_every_promise_names_tests_that_are_there():
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 13
    assert all("::test_" in row.split(" | ")[1] for row in rows)
    for file, name in NAMED:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), (file, name)


def test_nothing_of_ours_unpickles_or_evaluates():
    """Calls that run what a file holds; `compile` of a model and `eval` of a module are methods of other objects."""
    names = {"eval", "exec", "compile", "__import__"}
    for file in sorted((ROOT / "framework").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                of = node.module if isinstance(node, ast.ImportFrom) else None
                imported = {of, *(alias.name for alias in node.names)}
                assert not imported & {"pickle", "dill", "cloudpickle", "marshal", "shelve", "runpy", "code"}, file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in names, (file, called)
                assert called not in ("torch.load", "yaml.load", "yaml.unsafe_load"), file
                assert not {keyword.arg for keyword in node.keywords} & {"shell", "allow_pickle", "weights_only"}, file


def test_a_pickled_adapter_is_not_read(tmp_path, capsys, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    from framework.run.checkpoints.saved_model import SavedModel
    from framework.run.checkpoints.trained_model import with_adapter
    from tests.tiny import LLAMA

    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM"}))
    torch.save({}, tmp_path / "adapter_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(RequestError, match=r"adapter_model\.bin is pickled, which is not read"):
        with_adapter(LlamaForCausalLM(LlamaConfig(**LLAMA)), SavedModel(tmp_path, None))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch mark') }}",
        "{{ messages.append(1) }}{{ lipsum.__globals__['os'].popen('touch mark').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('touch mark') }}",
    ],
)
def test_a_template_reaches_no_python(template, tmp_path, monkeypatch):
    from framework.build.text.tokenizer import train_tokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["a b c"], 300)
    tokenizer.chat_template = template
    message = ""
    try:
        message = render(tokenizer, Chat([{"role": "user", "content": "a"}]))
    except (TemplateError, ValueError, TypeError, LookupError) as error:
        message = str(error)
    assert not re.search("root:|<class|<function|<module", message)
    assert not Path("mark").exists()


def test_a_script_of_a_dataset_does_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("framework.compose.request.detect", lambda: None)
    for folder in (Path("set"), Path("user/set")):
        folder.mkdir(parents=True)
        (folder / "set.py").write_text("open('mark', 'w').close()\n")
    for path in ("./set", "user/set", "./set/set.py"):
        Path("r.yaml").write_text(f"data: {{train: [{{path: {path}}}]}}\n")
        assert main(["data", "r.yaml", "model=llama3.2_1b", "gpu=cpu"]) == 2
    assert not Path("mark").exists()
