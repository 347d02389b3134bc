"""Tasks that a gateway hands to agents, and the rollouts collected from it."""

from dataclasses import replace

import numpy as np
import pytest

from gateway_calls import call, collect, line, post, submit
from score_centering.gateway.client import make_tasks
from score_centering.gateway.store import Limits
from score_centering.rollout.streams import streams

TASK = {"id": "t", "mode": "train", "problem": "1 + 2", "prompt_index": 0, "sample_index": 0, "seed": 1}


def test_tasks_are_handed_out_once_and_collected_when_their_agent_is_done(one):
    url, _ = one()
    tasks = make_tasks(["1 + 1", "1 + 2"], 2, "train", 3, "step")
    submit(url, *tasks)
    first = call(url, "/tasks/next", {"count": 3}).json()["tasks"]
    rest = call(url, "/tasks/next", {"count": 3}).json()["tasks"]
    assert [task["id"] for task in first + rest] == ["step-0-0", "step-0-1", "step-1-0", "step-1-1"]
    assert call(url, "/tasks/next", {"wait_seconds": 0.05}).json() == {"tasks": []}
    ids = [task["id"] for task in first]
    for id in ids:
        assert post(url, rollout=f"train/{id}").status_code == 200
        assert call(url, "/rollouts/collect", {"ids": ids}).status_code == 202
        assert call(url, f"/tasks/{id}/done", {}).status_code == 204
    assert [(r.prompt_index, r.sample_index) for (r,) in collect(url, *ids)] == [(0, 0), (0, 1), (1, 0)]
    assert line(call(url, "/rollouts/collect", {"ids": ids[:1]})) == (
        404, "rollout 'step-0-0': no such rollout, or it was collected already",
    )  # fmt: skip
    call(url, "/tasks/step-1-1/done", {"error": "a tool broke"})
    assert line(call(url, "/rollouts/collect", {"ids": ["step-1-1"]})) == (
        424, "rollout 'step-1-1': its agent failed: a tool broke",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "tasks: must be a list"),
        ({"tasks": [TASK, 3]}, "tasks[1]: must hold id (str), mode (str)"),
        ({"tasks": [TASK | {"seed": 1.5}]}, "tasks[0]: must hold"),
        ({"tasks": [TASK | {"more": 1}]}, "tasks[0]: must hold"),
        ({"tasks": [TASK | {"mode": "test"}]}, "tasks[0]: mode 'test': choose train or val"),
        ({"tasks": [TASK | {"id": ""}]}, "tasks[0]: its id must have 1 … 128 characters"),
        ({"tasks": [TASK | {"seed": 2**63}]}, "tasks[0]: seed 9223372036854775808 has more than 64 bits"),
    ],
)
def test_tasks_that_are_refused(one, body, message):
    url, _ = one()
    status, text = line(call(url, "/tasks", body))
    assert status == 400 and text.startswith(message)
    assert call(url, "/tasks/next", {}).json() == {"tasks": []}


def test_ids_of_tasks_are_used_once_and_bounded(one):
    url, _ = one(limits=Limits(rollouts=2))
    assert line(call(url, "/tasks", {"tasks": [TASK, TASK]})) == (409, "rollout 't': this id is in use")
    assert call(url, "/tasks", {"tasks": [TASK]}).status_code == 202
    assert line(call(url, "/tasks", {"tasks": [TASK]})) == (409, "rollout 't': this id is in use")
    two = [TASK | {"id": name} for name in "ab"]
    assert line(call(url, "/tasks", {"tasks": two}))[0] == 507


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tasks/next", {"count": 0}, "count = 0: must be a whole number of at least 1"),
        ("/tasks/next", {"wait_seconds": 31}, "wait_seconds = 31: allowed are 0 … 30"),
        ("/tasks/next", {"wait_seconds": "1"}, "wait_seconds = '1': allowed are 0 … 30"),
        ("/rollouts/collect", {}, "ids: must be a list of rollouts' names, each once"),
        ("/rollouts/collect", {"ids": ["a", "a"]}, "ids: must be a list of rollouts' names, each once"),
    ],
)
def test_calls_that_are_refused(one, path, body, message):
    url, _ = one()
    assert line(call(url, path, body)) == (400, message)


def test_streams_of_tasks_are_those_of_the_engine():
    tasks = make_tasks(["a", "b"], 3, "val", 17, "n")
    seeds = np.array([task.seed for task in tasks]).view(np.uint64)
    assert np.array_equal(seeds, streams(17, np.repeat([0, 1], 3), np.tile([0, 1, 2], 2)))
    assert [(task.prompt_index, task.sample_index, task.problem) for task in tasks][3] == (1, 0, "b")
    assert replace(tasks[0], id="x").mode == "val"
