import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from framework.build.text import tokenizer as tokenizer_module
from framework.build.text.tokenizer import build_tokenizer, padding_id, train_tokenizer
from framework.errors import RequestError
from framework.schema.config import TrainingConfig

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

CORPUS = ["The quick brown fox jumps over the lazy dog. What is two and two? It is four.\n"] * 3
STRANGE = 'def f(x):\n\tif x:\r\n        return "naïve 漢字 🦊 \\x00 \u200b"   # é\n\n\n\x0c  \n'


def config(**model: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"model": model})


def test_every_text_decodes_to_itself() -> None:
    tokenizer = train_tokenizer(CORPUS, 300)
    sources = sorted(Path(os.__file__).parent.glob("a*.py"))
    for text in [STRANGE, *(path.read_text("utf-8") for path in sources)]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_vocabulary_is_as_large_as_asked_and_has_the_special_tokens() -> None:
    tokenizer = build_tokenizer(config(tokenizer={"train": "bpe", "vocab_size": 310}), [*CORPUS, STRANGE])
    assert len(tokenizer) == 310
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


@pytest.mark.slow
def test_the_same_texts_give_the_same_tokenizer_in_another_process() -> None:
    program = (
        "from framework.build.text.tokenizer import train_tokenizer\n"
        f"print(train_tokenizer({[*CORPUS, STRANGE]!r}, 400).backend_tokenizer.to_str(), end='')"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout == train_tokenizer([*CORPUS, STRANGE], 400).backend_tokenizer.to_str()


@pytest.mark.parametrize("with_model_config", [False, True])
def test_saved_tokenizer_loads_the_usual_way(tmp_path: Path, with_model_config: bool) -> None:
    tokenizer = build_tokenizer(
        config(tokenizer={"train": "bpe", "vocab_size": 400}, chat_template="chatml"), [*CORPUS, STRANGE]
    )
    tokenizer.save_pretrained(tmp_path)
    if with_model_config:  # next to a Llama's config.json, transformers is tempted to read it as Llama's own tokenizer
        LlamaConfig().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded(STRANGE)["input_ids"] == tokenizer(STRANGE)["input_ids"]
    assert loaded.decode(loaded(STRANGE)["input_ids"]) == STRANGE
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Four."}]
    assert loaded.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    again = build_tokenizer(config(tokenizer_name=str(tmp_path)), iter(()))
    assert again.get_vocab() == tokenizer.get_vocab()


def test_building_reads_only_so_much_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "BPE_CHARACTERS", 100)
    texts = iter(["a" * 70, "b" * 70, "never read"])
    train_tokenizer(texts, 300)
    assert next(texts) == "never read"


def test_texts_are_not_read_for_a_loaded_tokenizer(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    texts = iter(["unread"])
    build_tokenizer(config(model_name=str(tmp_path)), texts)
    assert next(texts) == "unread"


def test_a_missing_pad_token_stays_missing(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    assert padding_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == tokenizer.eos_token_id
    assert tokenizer.pad_token_id is None
    tokenizer.eos_token = None
    assert padding_id(tokenizer) == 0


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(RequestError, match="no training text"):
        train_tokenizer(texts, 300)


class TestLoading:
    def problem(self, **model: object) -> str:
        with pytest.raises(RequestError) as caught:
            build_tokenizer(config(**model), iter(()))
        assert len(caught.value.problems) == 1
        return str(caught.value)

    def test_nothing_named(self) -> None:
        message = self.problem()
        assert "model.tokenizer_name" in message
        assert "train: bpe" in message

    def test_both_named_and_built(self) -> None:
        assert "only one" in self.problem(tokenizer_name="x", tokenizer={"train": "bpe"})

    def test_missing_folder_shows_both_paths_and_the_nearest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "models" / "tiny-llama").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        message = self.problem(model_name="./models/tiny-lama")
        assert "./models/tiny-lama" in message
        assert str(tmp_path / "models" / "tiny-lama") in message
        assert "did you mean ./models/tiny-llama" in message

    def test_folder_without_tokenizer_names_what_it_has(self, tmp_path: Path) -> None:
        LlamaConfig().save_pretrained(tmp_path)
        message = self.problem(model_name=str(tmp_path))
        assert "no tokenizer files; it has config.json" in message

    def test_folder_whose_tokenizer_would_be_empty(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        (tmp_path / "tokenizer_config.json").write_text("{}")
        assert "no vocabulary" in self.problem(model_name=str(tmp_path))

    def test_broken_file_is_reported_in_one_line(self, make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
        make_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
        message = self.problem(tokenizer_name=str(tmp_path))
        assert message.startswith("model.tokenizer_name: the tokenizer in ")
        assert len(message.splitlines()) == 1

    def test_offline_hub_is_reported_briefly_with_the_nearest_download(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        (tmp_path / "models--acme--tiny-chat").mkdir()
        message = self.problem(model_name="acme/tiny-chatt")
        assert "no folder" in message
        assert "huggingface.co cannot be reached from here" in message
        assert "did you mean acme/tiny-chat" in message
        assert len(message.splitlines()) <= 3


class TestChatTemplate:
    @pytest.mark.parametrize("written", ["chatml", "{{ messages[0]['content'] }}", "file"])
    def test_name_text_or_file(self, written: str, tmp_path: Path) -> None:
        if written == "file":
            path = tmp_path / "mine.jinja"
            path.write_text("{{ messages[0]['content'] }}!")
            written = str(path)
        tokenizer = build_tokenizer(config(tokenizer={"train": "bpe"}, chat_template=written), CORPUS)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert "Four" in tokenizer.apply_chat_template([{"role": "assistant", "content": "Four"}], tokenize=False)

    def test_neither_lists_the_names_and_the_nearest(self) -> None:
        with pytest.raises(RequestError) as caught:
            build_tokenizer(config(tokenizer={"train": "bpe"}, chat_template="chat-ml"), CORPUS)
        (problem,) = caught.value.problems
        assert problem.key == "model.chat_template"
        assert problem.nearest == "chatml"
        assert problem.expected is not None
        assert "gemma, llama3, mistral, phi3, plain" in problem.expected
        assert os.path.abspath("chat-ml") in problem.message


def test_a_length_that_is_no_number_is_refused(tmp_path: Path) -> None:
    train_tokenizer(CORPUS, 300).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "long"}))
    with pytest.raises(RequestError, match="model_max_length 'long'"):
        build_tokenizer(config(tokenizer_name=str(tmp_path)), [])
