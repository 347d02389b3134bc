"""The `error:` lines of failed jobs, by Snakemake's log."""

from score_centering.runs.last_words import errors_of_failed_jobs

BLOCK = """Error in rule {rule}:
    message: None
    jobid: 3
    log: {log} (check log file(s) for error details)
    shell:
"""


def test_each_failed_jobs_errors_are_told_once_in_order(tmp_path):
    texts = {"a": "loading\nerror: first\nerror: second\n", "b": "error: first\n", "c": "Traceback\nKeyError\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "healthy").write_text("error: of a job that did not fail\n")
    names = [*texts, "gone", "a"]
    log = tmp_path / "snakemake.log"
    log.write_text("Job 1: fine\n    log: healthy\n" + "".join(BLOCK.format(rule=n, log=tmp_path / n) for n in names))
    assert errors_of_failed_jobs([log]) == [
        "error: first",
        "error: second",
        f"error: a job failed without a word on why: {tmp_path / 'c'}",
    ]


def test_without_a_failed_job_nothing_is_told(tmp_path):
    (tmp_path / "log").write_text("Finished.\n")
    assert errors_of_failed_jobs([tmp_path / "log"]) == []
