"""`tunesmith push`: upload of an export and its model card to a Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from framework.build.hub import one_line
from framework.errors import Problem, RequestError
from framework.run.checkpoints.saved_model import find_saved_model

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LOGIN = "`hf auth login`, or HF_TOKEN with leave to write"


@dataclass(frozen=True)
class Pushed:
    """An upload, or a dry run of one: `files` are names and bytes."""

    folder: Path
    repository: str
    url: str
    is_private: bool
    files: tuple[tuple[str, int], ...]
    is_sent: bool

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self.files)


def push(
    source: Path, repository: str, *, public: bool = False, dry_run: bool = False, endpoint: str | None = None
) -> Pushed:
    """Upload the trained model of a run or folder to `owner/name`, which is created if missing, private unless
    `public`. With `dry_run` nothing is sent and no hub is contacted.

    `endpoint` is the hub's address, by default huggingface_hub's (HF_ENDPOINT). Raises RequestError for a folder
    without a model, an invalid repository name, an existing public repository without `public`, and a hub that refuses
    or does not answer.
    """
    folder = find_saved_model(source, trusts_code=True).folder
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    files = tuple((path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths)
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError("it names no owner")
    except HFValidationError as error:
        message = f"{repository} is not a repository name: {error}"
        raise RequestError([Problem("REPOSITORY", message, expected="owner/name")]) from None
    address = (endpoint or constants.ENDPOINT).rstrip("/")
    pushed = Pushed(folder, repository, f"{address}/{repository}", not public, files, is_sent=not dry_run)
    if not dry_run:
        _send(HfApi(endpoint=address), pushed)
    return pushed


def _send(api: "HfApi", pushed: Pushed) -> None:
    """Raises RequestError."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    # the client's own error for a failed upload, and those of the HTTP library that this version of it uses
    base: type[BaseException] = HfHubHTTPError.__mro__[1]
    no_answer = (OSError, RuntimeError, base)
    try:
        if pushed.is_private and api.repo_exists(pushed.repository) and not api.repo_info(pushed.repository).private:
            message = f"{pushed.url} exists and is public"
            raise RequestError([Problem("REPOSITORY", message, expected="--public, or another name")])
        api.create_repo(pushed.repository, private=pushed.is_private, exist_ok=True)
        api.upload_folder(
            repo_id=pushed.repository,
            folder_path=pushed.folder,
            allow_patterns=[name for name, _ in pushed.files],
            commit_message="tunesmith push",
        )
    except LocalTokenNotFoundError:
        raise RequestError([Problem("REPOSITORY", "nobody is logged in", expected=_LOGIN)]) from None
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else "?"
        expected = _LOGIN if code in (401, 403, 404) else None
        reason = error.server_message or str(error).partition("\n")[0]
        message = f"{pushed.url} was refused ({code}): {reason}"
        raise RequestError([Problem("REPOSITORY", message, expected=expected)]) from None
    except no_answer as error:
        message = f"{pushed.url} does not answer: {one_line(error)}"
        raise RequestError(
            [Problem("REPOSITORY", message, expected="a hub that is reachable, or --endpoint")]
        ) from None
