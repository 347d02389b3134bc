"""A finished run survives: starts of another identity, forced reruns that fail, kills while states move."""

import os
import shutil
import signal
import time

import pytest

from loading import load
from score_centering.runs import PRODUCTS, finished_again
from score_centering.runs.archive import declare_lost
from score_centering.runs.folder import restore
from score_centering.settings import UserError

KillAt = load("unit/runs/test_run_kill.py").KillAt
OTHER = {"config": {"trainer": {"lr": 0.2}}}


def contents(folder, without=("lock", "phase")):
    """Every file below `folder` with its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in without)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def declared(folder):
    return {name: (folder / name).read_bytes() for name in PRODUCTS if (folder / name).exists()}


def delete_declared(folder):
    """What Snakemake does ahead of a job."""
    for name in PRODUCTS:
        (folder / name).unlink()


def stop(step, run):
    if step == 4:
        raise SystemExit(9)


@pytest.fixture
def finished(tmp_path, train):
    folder = tmp_path / "runs" / "sc" / "seed0"
    train(folder)
    return folder


@pytest.fixture
def left(finished, fork, train):
    """A finished run, then one of another identity that the workflow started in its place and that was stopped."""
    before = declared(finished)
    delete_declared(finished)
    assert fork(lambda: train(finished, on_step=stop, **OTHER)).code == 9
    assert declared(finished) == {}
    return finished, before


def test_another_identity_is_refused_in_front_of_a_finished_run(finished, train, identity):
    before = contents(finished)
    for start in (lambda: train(finished, **OTHER), lambda: finished_again(finished, identity(**OTHER))):
        with pytest.raises(UserError) as caught:
            start()
        message = str(caught.value)
        assert "holds a finished run of another identity (config.trainer.lr: 0.1 there, 0.2 here)" in message
        assert message.endswith("name another folder for this one: --run-dir DIR") and "\n" not in message
    assert contents(finished) == before


def test_it_is_refused_beside_an_unfinished_state_and_without_run_json_too(finished, fork, train):
    assert fork(lambda: train(finished, on_step=stop)).code == 9  # the same identity, by hand, stopped
    before = declared(finished)
    shutil.move(finished / "state", finished / "state.old")
    with pytest.raises(UserError, match="finished run of another identity"):
        train(finished, **OTHER)
    assert declared(finished) == before


def test_a_lost_run_json_does_not_open_the_folder(finished, train):
    (finished / "run.json").unlink()
    with pytest.raises(UserError, match="finished run of another identity"):
        train(finished, **OTHER)


def test_where_the_workflow_deleted_the_files_another_identity_trains(finished, train):
    delete_declared(finished)
    assert train(finished, **OTHER) == 0
    assert b'"lr": 0.2' in (finished / "run.json").read_bytes()
    assert (finished / "state/archive/0001/PUBLISHED").exists()


@pytest.mark.parametrize("changes", [{}, OTHER])
@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt(), SystemExit(2)])
def test_a_start_that_fails_before_its_first_step_leaves_the_finished_run(finished, train, changes, error):
    delete_declared(finished)
    before = contents(finished)

    def fail(step, run):
        raise error

    with pytest.raises(type(error)):
        train(finished, on_step=fail, afresh=True, **changes)
    assert contents(finished) == before
    assert declare_lost(finished.parents[2]) == [finished]


def test_a_rerun_that_has_a_step_behind_it_stays(finished, fork, train, uninterrupted):
    delete_declared(finished)
    assert fork(lambda: train(finished, on_step=stop, afresh=True)).code == 9
    assert declare_lost(finished.parents[2]) == [], "its files are being made again"
    assert train(finished) == 2
    assert (finished / "metrics.parquet").read_bytes() == uninterrupted


def test_files_come_back_with_the_time_of_their_making(finished):
    before = declared(finished)
    made = (finished / "state/published/run.json").stat().st_mtime_ns
    delete_declared(finished)
    settings = finished.parent / "settings.json"
    time.sleep(0.02)
    settings.write_text("{}")
    assert declare_lost(finished.parents[2]) == [finished]
    assert declared(finished) == before
    assert (finished / "run.json").stat().st_mtime_ns == made < settings.stat().st_mtime_ns
    (finished / "run.json").unlink()
    assert declare_lost(finished.parents[2]) == [], "some are there: nobody deleted them ahead of a job"


def test_a_finished_run_whose_files_are_gone_is_not_trained(finished, identity):
    before = declared(finished)
    delete_declared(finished)
    (finished / "state/checkpoints").rename(finished / "elsewhere")  # nothing else is needed
    assert finished_again(finished, identity())
    assert declared(finished) == before
    (finished / "metrics.parquet").write_bytes(b"changed")
    assert finished_again(finished, identity())
    assert declared(finished) == before


def test_damaged_copies_are_not_declared(finished, identity):
    (finished / "state/published/run.json").write_text("{}")
    assert not finished_again(finished, identity())
    delete_declared(finished)
    assert declare_lost(finished.parents[2]) == [] and declared(finished) == {}
    with pytest.raises(UserError, match="copies of the declared files are missing or damaged"):
        restore(finished)


def test_going_back_brings_the_finished_run_back_and_forward_goes_on(left, train, identity):
    folder, before = left
    assert finished_again(folder, identity())
    assert declared(folder) == before
    delete_declared(folder)
    assert not finished_again(folder, identity(**OTHER)), "that one was not finished"
    assert train(folder, **OTHER) == 2, "it goes on from its checkpoint"
    assert b'"lr": 0.2' in (folder / "run.json").read_bytes()
    delete_declared(folder)
    assert finished_again(folder, identity())
    assert declared(folder) == before


def test_going_back_to_a_run_without_copies_declares_it_again(left, train):
    folder, before = left
    shutil.rmtree(folder / "state/archive/0001/published")
    assert train(folder) == 5, "its last checkpoint is its end"
    assert declared(folder)["metrics.parquet"] == before["metrics.parquet"]


def test_without_a_finished_run_to_go_back_to_unfinished_work_stays(left, train):
    folder, _ = left
    with pytest.raises(UserError, match="holds an unfinished run of another identity"):
        train(folder, config={"trainer": {"lr": 0.3}})
    assert train(folder, config={"trainer": {"lr": 0.3}}, afresh=True) == 0
    assert len(list((folder / "state/archive").iterdir())) == 2, "afresh sets it aside"


def test_restore_brings_the_newest_finished_run_back(left, train):
    folder, before = left
    said = restore(folder)
    assert said.startswith(f"{folder}: restored from {folder / 'state/archive/0001'}: metrics.parquet, ")
    assert declared(folder) == before
    assert restore(folder).endswith("every declared file was there")
    (unfinished,) = (folder / "state/archive").iterdir()
    with pytest.raises(UserError, match="holds no finished run"):
        restore(folder, int(unfinished.name))
    with pytest.raises(UserError, match="0099: holds no finished run"):
        restore(folder, 99)


def test_restore_takes_the_archive_that_is_named(finished, train):
    first = declared(finished)
    delete_declared(finished)
    train(finished, **OTHER)
    restore(finished, 1)
    assert declared(finished) == first


def test_restore_of_nothing_is_one_line(tmp_path, fork, train):
    with pytest.raises(UserError, match="holds no state of a run"):
        restore(tmp_path)
    fork(lambda: train(tmp_path, on_step=stop))
    with pytest.raises(UserError, match="archive: holds no finished run"):
        restore(tmp_path)


def test_a_kill_while_states_move_loses_nothing(left, tmp_path, fork, identity, train):
    """Killed at every file operation of going back, then of going forward again."""
    folder, before = left
    when = kills = 0
    while True:
        when += 1
        copy = tmp_path / f"at{when}"
        shutil.copytree(folder, copy)

        def back(copy=copy, when=when):
            KillAt(when)
            finished_again(copy, identity())

        ended = fork(back).code
        assert finished_again(copy, identity()), when
        assert declared(copy) == before, when
        delete_declared(copy)

        def forward(copy=copy, when=when):
            KillAt(when)
            train(copy, **OTHER)

        fork(forward)
        if not (copy / "run.json").exists():
            train(copy, **OTHER)
        delete_declared(copy)
        assert finished_again(copy, identity()) and declared(copy) == before, when
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        kills += 1
        shutil.rmtree(copy)
    assert kills > 20
    assert os.listdir(folder / "state/archive") == ["0001"]
