"""Command lines with `-m`: the runs, the overrides and the folder of each, and refused sweeps."""

from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from framework.compose.overrides import parse
from framework.compose.sweep import quoted, sweep_of
from framework.errors import RequestError


def jobs_of(*arguments: str, folder: str = "runs/r"):
    sweep = sweep_of(arguments)
    return sweep, sweep.outline(folder).jobs


def problems_of(*arguments: str) -> dict[str, str]:
    with pytest.raises(RequestError) as refused:
        jobs_of(*arguments)
    return {problem.key: str(problem) for problem in refused.value.problems}


def test_every_combination_in_order_with_what_is_shared_where_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep, jobs = jobs_of(
        "training.seed=1,2", "model.freeze_layers+=[x]", "++peft.lora_r=range(8,17,8)", "~data.packing"
    )
    assert [sweep.overrides_of(job) for job in jobs] == [
        [f"training.seed={seed}", "model.freeze_layers+=[x]", f"peft.lora_r={rank}", "~data.packing"]
        for seed in (1, 2)
        for rank in (8, 16)
    ]
    assert [job.folder for job in jobs] == [tmp_path / "runs" / "r" / str(number) for number in range(4)]
    assert {job.sweep for job in jobs} == {tmp_path / "runs" / "r"}


def test_presets_sweep_with_keys_of_their_sections_and_may_be_files():
    sweep, jobs = jobs_of("gpu=40gb,40gb,'/a b/card.yaml'", "gpu.count=1,2", "model=glob(gpt2*)")
    assert len(jobs) == 3 * 2 * 2
    assert sweep.overrides_of(jobs[-1]) == ["gpu='/a b/card.yaml'", "gpu.count=2", "model=gpt2_small"]


def test_items_of_lists_and_text_in_quotes_stay_what_they_are():
    sweep, jobs = jobs_of("data.train[0].path='a,b',c.txt")
    problems = []
    [first, second] = [parse(sweep.overrides_of(job), problems).writes[0] for job in jobs]
    assert (first.path, first.node.value, second.node.value) == (("data", "train", 0, "path"), "a,b", "c.txt")
    assert not problems


@pytest.mark.slow
def test_folders_are_named_as_hydra_names_them(tmp_path):
    named = ["hydra.sweep.dir=" + quoted(f"{tmp_path}/it's"), "hydra.sweep.subdir='${hydra.job.override_dirname}'"]
    _, jobs = jobs_of("training.seed=1,2", "optimizer=lion,sgd", *named)
    assert jobs[0].folder == tmp_path / "it's" / "optimizer=lion,training.seed=1"
    _, jobs = jobs_of("training.seed=1,2", "hydra.sweep.subdir='run-${hydra:job.num}'")
    assert [job.folder.name for job in jobs] == ["run-0", "run-1"]
    assert "would write to" in problems_of("training.seed=1,2", "hydra.sweep.subdir=x")["hydra.sweep.subdir"]


def test_all_wrong_overrides_are_reported_at_once():
    found = problems_of(
        "hydra.run.dir=x", "hydra.launcher._target_=os.system", "hydra.sweeper.params={training.seed:1}",
        "hydra.sweep.dir=a,b", "model.freeze_layers+=[a],[b]", "training.output_dir=a,b",
        "trainng.seed=1,2", "training.seed=1,2", "training.seed=3",
    )  # fmt: skip
    assert len(found) == 8
    assert "hydra.sweep.subdir" in found["training.output_dir=a,b"]
    assert "training.seed" in found["trainng.seed"]
    assert "once more" in found["training.seed"]
    assert "-m" in problems_of("training.seed=1")
    assert "INTERVAL" in problems_of("training.learning_rate=interval(1e-5,1e-3)")["-m"]


def test_what_hydra_does_not_have_is_reported_with_what_brings_it():
    found = problems_of("training.seed=1,2", "hydra/launcher=nowhere", "hydra/sweeper=ax")
    assert "basic" in found["hydra/launcher=nowhere"]
    assert "pip install hydra-ax-sweeper" in found["hydra/sweeper=ax"]
    assert list(problems_of("training.seed=1,2", "hydra.launcher.n_jobs=2")) == ["hydra.launcher.n_jobs=2"]


@pytest.mark.slow
def test_hydra_hands_out_the_runs_of_the_outline_and_forgets_the_sweep(tmp_path):
    before = dict(ConfigStore.instance().repo), GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    sweep, jobs = jobs_of("training.seed=1,2", "gpu=24gb,cpu", folder=str(tmp_path))
    made = []
    sweep.launch(tmp_path, lambda job: made.append(job) or 0.0)
    assert made == list(jobs)
    assert (dict(ConfigStore.instance().repo), GlobalHydra.instance().hydra, HydraConfig.instance().cfg) == before


@pytest.mark.parametrize("text", ["runs/a", "a b", "it's", "a\\", "x=1,y=[2]", "a\\'b"])
def test_any_text_can_be_swept(text):
    problems = []
    [write] = parse([f"training.output_dir={quoted(text)}"], problems).writes
    assert (write.node.value, problems) == (text, [])
    assert Path(write.node.value) == Path(text)
