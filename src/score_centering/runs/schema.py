"""The columns of metrics.parquet and timing.parquet: declared once, checked on every read. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from score_centering.settings import UserError

SCHEMA_VERSION = 2
FILE_METADATA = ("experiment", "arm", "seed", "schema_version")


@dataclass(frozen=True)
class Column:
    name: str
    type: pa.DataType
    unit: str
    definition: str

    def field(self) -> pa.Field:
        return pa.field(
            self.name,
            self.type,
            nullable=self.name != "step",
            metadata={"unit": self.unit, "definition": self.definition},
        )


F64, I64, I32 = pa.float64(), pa.int64(), pa.int32()
UTC_TIME = pa.timestamp("us", tz="UTC")

STEP = Column("step", I32, "1", "number of optimiser updates made so far; 0 is the state before the first one")

METRIC_COLUMNS = (
    STEP,
    Column("reward_mean", F64, "1", "mean reward of the step's rollouts, each 0 or 1"),
    Column("reward_std", F64, "1", "standard deviation (ddof 1) of those rewards"),
    Column("response_length_mean", F64, "tokens", "mean number of generated tokens of a rollout"),
    Column("response_length_max", F64, "tokens", "largest number of generated tokens of a rollout"),
    Column("truncated_share", F64, "1", "share of rollouts cut at the response limit"),
    Column("generated_tokens", I64, "tokens", "generated tokens of all rollouts of the step"),
    Column(
        "sampler_age", I64, "steps", "updates since the weights that sampled the step's rollouts; 0 when they are fresh"
    ),
    Column("loss", F64, "nats", "value of the objective; null where the update was skipped as non-finite"),
    Column("grad_norm", F64, "1", "Euclidean norm of the gradient before clipping; null where it was not finite"),
    Column("learning_rate", F64, "1", "learning rate of the update"),
    Column("entropy", F64, "nats/token", "mean entropy of the trainer's next-token distribution p"),
    Column(
        "k3_kl", F64, "nats/token", "mean over generated tokens of exp(d) - 1 - d, d = log p - log q clamped to ±20"
    ),
    Column("k1_kl", F64, "nats/token", "mean over generated tokens of -d = log q - log p"),
    Column("abs_logprob_gap_mean", F64, "nats", "mean of |d| over generated tokens"),
    Column("abs_logprob_gap_max", F64, "nats", "largest |d| of the step"),
    Column("importance_ratio_mean", F64, "1", "mean p/q of the generated tokens; 1 in expectation"),
    Column(
        "importance_ratio_p99", F64, "1", "99th percentile of p/q of the generated tokens, rounded up by at most 1 %"
    ),
    Column(
        "effective_sample_share",
        F64,
        "1",
        "effective sample size of the ratios p/q over the number of generated tokens: (sum r)^2 / (n · sum r^2)",
    ),
    Column("importance_ratio_max", F64, "1", "largest p/q of a generated token"),
    *(
        Column(f"k3_kl_position_{i}", F64, "nats/token", f"k3_kl of the {i}. quarter of the responses' tokens")
        for i in (1, 2, 3, 4)
    ),
    *(
        Column(f"k3_kl_entropy_{i}", F64, "nats/token", f"k3_kl of tokens where p has an entropy {band} nats")
        for i, band in enumerate(("below 0.1", "from 0.1 to 0.5", "from 0.5 to 1", "of at least 1"), start=1)
    ),
    Column("token_chi2", F64, "1", "mean over generated tokens of (p/q)^2 - 1"),
    Column("k3_clamped_tokens", I64, "tokens", "generated tokens whose d was clamped for k3_kl"),
    Column("importance_weight_mean", F64, "1", "mean importance weight f(p/q) of the generated tokens"),
    Column("importance_masked_share", F64, "1", "share of generated tokens whose importance weight is 0"),
    Column("importance_masked_share_positive", F64, "1", "that share among tokens with a positive advantage"),
    Column("importance_masked_share_negative", F64, "1", "that share among tokens with a negative advantage"),
    Column("clip_share", F64, "1", "share of generated tokens whose ratio a clip or a cap bounded"),
    Column("clip_share_positive", F64, "1", "that share among tokens with a positive advantage"),
    Column("clip_share_negative", F64, "1", "that share among tokens with a negative advantage"),
    Column("head_mass_sampler", F64, "1", "mean mass Q_H of the sampler's recorded candidates under q"),
    Column("head_mass_trainer", F64, "1", "mean mass P_H of the same candidates under p"),
    Column("correction_abs_mean", F64, "1", "mean over generated tokens of the summed |c_v| of the candidates"),
    Column(
        "drift_norm",
        F64,
        "1",
        "norm of g, the gradient of Σ w·A·Σ c_v·log p_v over the candidates, of the step's first update; null where it "
        "was not measured",
    ),
    Column("drift_share", F64, "1", "that norm over the norm of the arm's own gradient before clipping"),
    Column("drift_coherence", F64, "1", "norm of the sum of all g so far over the sum of their norms"),
    Column("advantage_abs_mean", F64, "1", "mean |advantage| of the step's rollouts"),
    Column("zero_variance_group_share", F64, "1", "share of prompts whose rollouts all had the same reward"),
    Column("scorer_errors", I64, "rollouts", "answers on which the scorer failed; they got reward 0"),
    Column("scorer_timeouts", I64, "rollouts", "answers on which the scorer ran out of time; they got reward 0"),
    Column(
        "nonfinite_updates", I64, "updates", "updates of this step skipped for a loss or gradient that is not finite"
    ),
    Column("val_reward_mean", F64, "1", "mean reward of the greedy validation after this step's update"),
    Column(
        "clean_reward_mean",
        F64,
        "1",
        "mean reward of the trained weights on the validation prompts, each sampled once in BF16 at temperature 1, "
        "beside val_reward_mean; null without trainer.clean_reward and from the verl trainer, which has no BF16 engine",
    ),
    Column("val_response_length_mean", F64, "tokens", "mean generated tokens of the greedy validation"),
    Column("val_truncated_share", F64, "1", "share of validation rollouts cut at the response limit"),
)

TIMING_COLUMNS = (
    STEP,
    Column("rollout_s", F64, "s", "generating the rollouts"),
    Column("reward_s", F64, "s", "scoring them"),
    Column("update_s", F64, "s", "forward, backward and optimiser"),
    Column("sync_s", F64, "s", "handing the new weights to the rollout engine"),
    Column("validation_s", F64, "s", "validation, greedy and clean"),
    Column("checkpoint_s", F64, "s", "writing the checkpoint of the step before"),
    Column("step_s", F64, "s", "the whole step"),
    Column("tokens_per_s", F64, "tokens/s", "generated tokens over rollout_s"),
    Column("peak_rss_bytes", I64, "B", "peak resident memory of the trainer's process so far"),
    Column("started_at", UTC_TIME, "UTC", "wall-clock time at the start of the step; orders nothing"),
)

METRICS = pa.schema([column.field() for column in METRIC_COLUMNS])
TIMING = pa.schema([column.field() for column in TIMING_COLUMNS])


def read_metrics(path: str | Path) -> pa.Table:
    """metrics.parquet as a table of schema `METRICS`, one row a step in rising order; the file's Arrow metadata
    (`FILE_METADATA`, bytes) is kept as `table.schema.metadata`.

    Raises:
        UserError: one line that names the file and what is wrong with it.
    """
    return _read(Path(path), METRICS)


def read_timing(path: str | Path) -> pa.Table:
    """timing.parquet as a table of schema `TIMING`; see `read_metrics`."""
    return _read(Path(path), TIMING)


def table_bytes(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """`table` as a parquet file. Equal rows and metadata give equal bytes: every writer option is fixed here."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({**metadata, "schema_version": str(SCHEMA_VERSION)}),
        sink,
        row_group_size=1 << 20,
        version="2.6",
        data_page_version="1.0",
        compression="snappy",
        use_dictionary=False,
        write_statistics=True,
        store_schema=True,
        write_page_checksum=True,
    )
    return sink.getvalue().to_pybytes()


def _read(path: Path, expected: pa.Schema) -> pa.Table:
    table, metadata = _load(path)
    version = metadata.get("schema_version")
    if version != str(SCHEMA_VERSION):
        raise UserError(
            f"{path}: schema version {version or 'missing'}, this code reads {SCHEMA_VERSION}; train it anew"
        )
    for key in FILE_METADATA:
        if key not in metadata:
            raise UserError(f"{path}: its metadata lacks {key!r}; this is no run's table")
    if table.column_names != expected.names:
        odd = sorted(set(table.column_names) ^ set(expected.names)) or ["their order"]
        raise UserError(f"{path}: columns differ from schema version {SCHEMA_VERSION}: {', '.join(odd)}")
    for field in expected:
        if table.schema.field(field.name).type != field.type:
            found = table.schema.field(field.name).type
            raise UserError(f"{path}: column {field.name} is {found}, must be {field.type}")
    steps = table["step"].to_pylist()
    if any(step is None for step in steps) or any(b <= a for a, b in pairwise(steps)):
        raise UserError(f"{path}: column step must rise from row to row and never be null")
    return table


def _load(path: Path) -> tuple[pa.Table, dict[str, str]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        names = table.column_names
        metadata = table.schema.metadata or {}
        return table.rename_columns(names).replace_schema_metadata(metadata), {
            key.decode(): value.decode() for key, value in metadata.items()
        }
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable parquet file: {' '.join(str(error).split())[:160]}") from None
