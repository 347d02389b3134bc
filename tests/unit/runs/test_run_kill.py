"""kill -9 before, or in the middle of, every fifth file operation of a run; then start it again."""

import os
import random
import signal

import pytest

from score_centering.runs.folder import read_phase

OPERATIONS = ("open", "write", "pwrite", "fsync", "replace", "ftruncate", "mkdir", "unlink", "rmdir")
STRIDE = 5  # of about 110 operations; 1 takes five times as long and passes as well


class KillAt:
    """Patches `os` in a child process: dies at file operation number `when`, with half of a write done."""

    def __init__(self, when: int | None) -> None:
        self.when, self.count = when, 0
        for name in OPERATIONS:
            setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, operation):
        def call(*arguments, **options):
            self.count += 1
            if self.count == self.when:
                if operation.__name__ in ("write", "pwrite"):
                    descriptor, content, *offset = arguments
                    operation(descriptor, content[: len(content) // 2], *offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call


def count_operations(fork, train, folder) -> int:
    counted = folder / "count"

    def child():
        killer = KillAt(None)
        train(folder / "run")
        counted.write_text(str(killer.count))

    assert fork(child).code == 0
    return int(counted.read_text())


def killed(fork, train, folder, when: int) -> bool:
    def child():
        KillAt(when)
        train(folder)

    return fork(child).code == -signal.SIGKILL


def test_every_kill_ends_in_the_same_bytes(tmp_path, fork, train, uninterrupted):
    total = count_operations(fork, train, tmp_path)
    assert total > 80
    phases = set()
    for when in range(1, total + 1, STRIDE):
        folder = tmp_path / f"at{when}"
        assert killed(fork, train, folder, when), when
        if phase := read_phase(folder):
            phases.add(phase.name)
        ended = fork(lambda folder=folder: train(folder))
        assert ended.code == 0, (when, ended.stderr)
        assert (folder / "metrics.parquet").read_bytes() == uninterrupted, when
        assert (folder / "state" / "PUBLISHED").exists()
        assert not list(folder.glob(".*")), when
    assert phases == {"start", "rollout", "update", "metrics", "checkpoint", "publish"}


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_again_and_again_ends_in_the_same_bytes(tmp_path, fork, train, uninterrupted, seed):
    source = random.Random(seed)
    kills = 0
    while killed(fork, train, tmp_path, source.randint(5, 70)):
        kills += 1
        assert kills < 60
    assert kills > 0
    assert (tmp_path / "metrics.parquet").read_bytes() == uninterrupted
