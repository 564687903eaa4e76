"""`push` to a stand-in of the hub's HTTP interface in this process: received files, and refusals."""

import base64
import hashlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from framework.cli import main
from framework.errors import RequestError
from framework.run.publish import push

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # within the client
WEIGHTS = bytes(range(256)) * 64


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload asks for. `server.files` came with commits, `server.repos` is name -> private."""

    def log_message(self, *_):
        pass

    def answer(self, document=None, code=200):
        body = json.dumps(document if document is not None else {}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if code == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self):
        name = self.path.removeprefix("/api/models/").partition("?")[0].partition("/revision")[0]
        if name not in self.server.repos:
            return self.answer({"error": "Repository not found"}, 404)
        self.answer({"id": name, "private": self.server.repos[name], "siblings": [], "sha": "0" * 40})

    def do_POST(self):
        hub, body = self.server, self.body()
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refuses:
            return self.answer({"error": "You are not allowed"}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.repos.setdefault(name, asked.get("private", asked.get("visibility") == "private"))
            self.answer({"url": f"{hub.address}/{name}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in files
            ]
            self.answer({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            href = {"upload": {"href": f"{hub.address}/put"}}
            self.answer({"transfer": "basic", "objects": [{**each, "actions": href} for each in objects]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.stored[value["oid"]]
            self.answer({"commitUrl": f"{hub.address}/me/it/commit/1", "commitOid": "1" * 40, "commitMessage": "m"})
        else:
            self.answer({})

    def do_PUT(self):
        body = self.body()
        self.server.stored[hashlib.sha256(body).hexdigest()] = body
        self.answer()


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.repos, server.files, server.stored, server.tokens, server.refuses = {}, {}, {}, set(), False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_TOKEN", "hf_of_these_tests")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own for large files
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def final(tmp_path):
    folder = tmp_path / "run" / "final"
    folder.mkdir(parents=True)
    for name, content in {
        "config.json": b'{"model_type": "llama"}',
        "README.md": b"---\ntags: [tunesmith]\n---\n# run\n",
        "model.safetensors": WEIGHTS,
        ".hidden": b"no",
    }.items():
        (folder / name).write_bytes(content)
    return folder


def test_all_files_arrive_in_a_private_repository(hub, final):
    pushed = push(final.parent, "me/it", endpoint=hub.address)
    assert hub.repos == {"me/it": True}
    expected = {path.name: path.read_bytes() for path in final.iterdir() if path.name != ".hidden"}
    assert hub.files == expected
    assert pushed.url == f"{hub.address}/me/it"
    assert dict(pushed.files) == {name: len(content) for name, content in expected.items()}
    assert hub.tokens == {"Bearer hf_of_these_tests"}
    push(final, "me/it", endpoint=hub.address)  # again, and by the folder itself


def test_public_is_asked_for_and_a_public_one_is_not_written_to_by_accident(hub, final):
    push(final, "me/open", public=True, endpoint=hub.address)
    assert hub.repos == {"me/open": False}
    hub.files.clear()
    with pytest.raises(RequestError, match=r"(?s)exists and is public.*--public"):
        push(final, "me/open", endpoint=hub.address)
    assert hub.files == {}


def test_a_dry_run_asks_no_hub(hub, final, capsys):
    assert main(["push", str(final), "me/it", "--dry-run", "--endpoint", hub.address, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["url"] == f"{hub.address}/me/it"
    assert (document["private"], document["sent"]) == (True, False)
    assert {file["name"]: file["bytes"] for file in document["files"]}["model.safetensors"] == len(WEIGHTS)
    assert (hub.repos, hub.files) == ({}, {})


@pytest.mark.parametrize(
    ("name", "message"), [("it", "is not a rep"), ("a/b/c", "is not a rep"), ("me/..", "is not a rep")]
)
def test_a_name_that_no_repository_can_have(final, name, message):
    with pytest.raises(RequestError, match=message):
        push(final, name, dry_run=True)


def test_a_hub_that_refuses_or_is_not_there_is_a_sentence_with_exit_2(hub, final, tmp_path, capsys):
    hub.refuses = True
    assert main(["push", str(final), "me/it", "--endpoint", hub.address]) == 2
    output = capsys.readouterr().err
    assert "was refused (403)" in output
    assert "HF_TOKEN" in output
    assert main(["push", str(final), "me/it", "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["push", str(tmp_path), "me/it"]) == 2


@pytest.mark.slow
@pytest.mark.fresh_process
def test_what_is_sent_is_known_without_torch(final):
    code = "import sys; from framework.run.publish import push; from pathlib import Path; "
    code += f"push(Path({str(final)!r}), 'me/it', dry_run=True); sys.exit(9 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
