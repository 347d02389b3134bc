"""One owner, signals, parents that die, GPU leases."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from score_centering import runs
from score_centering.runs import gpu_lease, open_run
from score_centering.runs.lock import in_use
from score_centering.runs.process import StopFlag


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def test_a_second_start_is_refused_with_pid_and_host(tmp_path, identity, train, fork):
    with open_run(tmp_path, identity()):
        assert in_use(tmp_path / "state" / "lock")
        ended = fork(lambda: train(tmp_path))
    assert ended.code == 2
    lines = ended.stderr.splitlines()
    assert len(lines) == 1
    assert f"is in use by process {os.getpid()} on {os.uname().nodename};" in lines[0]
    assert not in_use(tmp_path / "state" / "lock")


def test_a_look_at_the_lock_refuses_no_start(tmp_path, identity):
    """`watch` and `audit` hold it for an instant; so long, here."""
    with open_run(tmp_path, identity()):
        pass
    looking = os.open(tmp_path / "state" / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, (looking,)).start()
    with open_run(tmp_path, identity()):
        assert in_use(tmp_path / "state" / "lock")


def test_a_stale_lock_is_recognised(tmp_path, train, fork):
    assert fork(lambda: train(tmp_path, on_step=lambda step, run: os.kill(os.getpid(), signal.SIGKILL))).code == -9
    assert (tmp_path / "state" / "lock").read_text()
    ended = fork(lambda: train(tmp_path))
    assert ended.code == 0
    assert "ended without releasing it; going on" in ended.stderr
    assert (tmp_path / "state" / "lock").read_text() == ""


def test_a_forked_worker_does_not_keep_the_lock_of_a_dead_trainer(tmp_path, identity, train, fork):
    pid_file = tmp_path / "worker.pid"

    def trainer():
        with open_run(tmp_path / "run", identity()):
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            pid_file.write_text(str(worker))
            os.kill(os.getpid(), signal.SIGKILL)

    assert fork(trainer).code == -signal.SIGKILL
    worker = int(pid_file.read_text())
    try:
        assert fork(lambda: train(tmp_path / "run")).code == 0
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_stop_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, fork, train, uninterrupted, number):
    def send(step, run):
        if step == 3:
            os.kill(os.getpid(), number)

    ended = fork(lambda: train(tmp_path, save_freq=100, on_step=send))
    assert ended.code == runs.EXIT_RESUMABLE == 75
    assert signal.Signals(number).name in ended.stderr and "stopped after step 3" in ended.stderr
    assert not (tmp_path / "metrics.parquet").exists()
    assert fork(lambda: train(tmp_path)).code == 0
    assert (tmp_path / "metrics.parquet").read_bytes() == uninterrupted


def test_handlers_are_put_back(tmp_path, identity):
    before = signal.getsignal(signal.SIGTERM)
    with open_run(tmp_path, identity()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_twice_stops_at_once():
    flag = StopFlag()
    flag.handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        flag.handle(signal.SIGINT, None)


def test_a_forked_worker_still_ends_on_sigterm(tmp_path, identity, fork):
    def trainer():
        with open_run(tmp_path, identity()):
            ready, say_ready = os.pipe()
            worker = os.fork()
            if worker == 0:
                os.write(say_ready, b"!")
                time.sleep(60)
                os._exit(0)
            os.read(ready, 1)
            os.kill(worker, signal.SIGTERM)
            _, status = os.waitpid(worker, 0)
            raise SystemExit(-os.waitstatus_to_exitcode(status))

    assert fork(trainer).code == signal.SIGTERM


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from score_centering.runs.process import die_with_parent
die_with_parent(int(sys.argv[1]))
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(60)
''', str(os.getpid()), sys.argv[1]])
time.sleep(60)
"""


def test_a_child_dies_with_its_killed_parent(tmp_path):
    pid_file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(pid_file)]) as parent:
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        child = int(pid_file.read_text())
        parent.kill()
        wait_until(lambda: not running(child))


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_parent_that_is_already_gone_is_noticed(fork):
    ended = fork(lambda: runs.die_with_parent(1 << 22))
    assert ended.code == 2
    assert "process 4194304, which started this one, has already ended" in ended.stderr


def test_a_gpu_has_one_owner(tmp_path, monkeypatch, fork):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def take(gpu):
        with gpu_lease(gpu):
            pass

    with gpu_lease("uuid-a"):
        ended = fork(lambda: take("uuid-a"))
        assert ended.code == 2
        assert f"GPU uuid-a is in use by process {os.getpid()} on" in ended.stderr
        assert fork(lambda: take("uuid-b")).code == 0
    assert fork(lambda: take("uuid-a")).code == 0


def test_a_gpu_is_shared_by_as_many_runs_as_it_has_places(tmp_path, monkeypatch, fork):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def take():
        with gpu_lease("uuid", 2):
            pass

    with gpu_lease("uuid", 2):
        assert fork(take).code == 0
        with gpu_lease("uuid", 2):
            ended = fork(take)
            assert ended.code == 2
            assert f"GPU uuid, shared by 2 runs, is in use by process {os.getpid()} on" in ended.stderr
        assert fork(take).code == 0


def test_durations_do_not_follow_the_wall_clock(monkeypatch):
    monkeypatch.setattr(time, "time", iter([100.0, 50.0, 0.0]).__next__)
    watch = runs.Stopwatch()
    with watch("step_s"):
        time.time()
    with watch("step_s"):
        time.time()
    seconds = watch.lap()
    assert set(seconds) == {"step_s"} and seconds["step_s"] >= 0
    assert watch.lap() == {}
    assert runs.peak_rss_bytes() > 1 << 20


def test_peak_memory_is_this_programs_not_its_parents():
    held = bytearray(300_000_000)
    program = "from score_centering.runs import peak_rss_bytes; print(peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 10_000_000 < int(done.stdout) < len(held) < runs.peak_rss_bytes()
