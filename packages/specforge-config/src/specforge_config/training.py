"""The training loop: length, batches, precision, sharding, checkpoints."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from specforge_config.base import Config


class TrainingConfig(Config):
    """How long and in which portions the draft is trained."""

    epochs: PositiveInt = 1
    """Passes over the prompts, each in its own order."""
    max_steps: PositiveInt | None = None
    """Optimizer steps after which the run ends, if the epochs last that long."""
    batch_size: PositiveInt | None = 1
    """Samples a rank takes in a micro-step, packed into one row; null takes all of its share of
    `global_batch_size` at once."""
    global_batch_size: PositiveInt | None = None
    """Samples of one optimizer step over all ranks; the accumulation follows. Default: one micro-step."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of the draft's computation; master weights and reductions are float32. `auto`: bfloat16 on
    GPUs, float32 on a CPU."""
    sharding: Literal["no_shard", "grad_op", "full", "hybrid"] = "grad_op"
    """What is sharded: nothing; gradients and optimizer states; parameters too; or all of it inside an
    island, replicated over islands."""
    unsupervised: Literal["drop", "error"] = "drop"
    """What happens to a sample without any anchor: dropped and counted, or an error that names it."""
    save_every: NonNegativeInt = 100
    """Steps between checkpoints; 0 saves only at the end and on a stop."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep."""
    log_every: PositiveInt = 10
    """Steps between lines of `metrics.jsonl`."""
    resume: Literal["auto", "never", "required"] = "auto"
    """`auto` goes on from the newest whole checkpoint in `output_dir`; `never` refuses a folder that has one;
    `required` refuses one without."""
