"""Chat templates given by name, as a file or as text."""

from pathlib import Path

from framework.build.hub import nearest
from framework.errors import Problem, RequestError
from framework.paths import path_like, read_regular

TEMPLATES = Path(__file__).parent / "templates"
OTHER_NAMES = {
    **dict.fromkeys(("llama-3", "llama_3", "llama3.1", "llama3.2", "llama3.3", "llama-3.1", "llama-3.2"), "llama3"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma_chat"), "gemma"),
    **dict.fromkeys(("phi-3", "phi_3", "phi3.5", "phi-3.5", "phi_35"), "phi3"),
    **dict.fromkeys(("mistral_v1", "mistral-instruct"), "mistral"),
    **dict.fromkeys(("im_start", "chatml_oai"), "chatml"),
    "vicuna_v1.1": "vicuna",
}
"""Other tools' names of our templates."""
THE_MODELS_OWN = ("tokenizer_default", "tokenizer", "default", "auto")
"""Other tools' names for the tokenizer's own template."""


def template_names() -> list[str]:
    """Names that `model.chat_template` accepts in addition to a text or a file."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def read_template(written: str) -> str:
    """The Jinja text for `model.chat_template`: one of our names, the text itself, or the path of a file.

    Raises RequestError if it is none of them.
    """
    name = OTHER_NAMES.get(written.lower(), written.lower())
    if name in template_names():
        return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    if "{{" in written or "{%" in written:
        return written
    path = Path(written).expanduser()
    if written in THE_MODELS_OWN and not path.exists():
        message = f"{written!r} is not a template"
        raise RequestError([Problem("model.chat_template", message, expected="unset, which is the tokenizer's own")])
    try:
        return read_regular(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        problem = Problem(
            "model.chat_template",
            f"{written!r} is not one of our templates, has no Jinja in it, and the file {path.absolute()} {reason}",
            expected=f"a file, a Jinja text, or one of: {', '.join(template_names())}",
            nearest=nearest(written, template_names()) or path_like(written, Path.is_file),
        )
        raise RequestError([problem]) from error
