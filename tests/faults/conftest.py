"""The random seed, printed; and a run without faults for comparison."""

import pytest

from tests.faults import profile
from tests.faults.tiny_runs import Whole, log_of, request, write_corpus
from tests.run.test_trainer import final_weights, train


def pytest_report_header() -> str:
    return f"faults: FAULTS={profile.LENGTH} FAULTS_SEED={profile.SEED}"


@pytest.fixture(autouse=True)
def _seed_is_printed() -> None:
    """pytest shows it with what fails."""
    print(f"to run it again: FAULTS={profile.LENGTH} FAULTS_SEED={profile.SEED}")


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    corpus, run = write_corpus(folder), folder / "run"
    train(request(corpus, run))
    return Whole(corpus, run, log_of(run), final_weights(run))
