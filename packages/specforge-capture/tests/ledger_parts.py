"""A plan, a contract and refs for tests of the ledger that need no store."""

from specforge_capture.ledger import Entry, Ledger
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.refs import FeatureRef
from specforge_config.features import CaptureSpec

PLAN = PromptPlan(
    num_rows=10,
    fingerprint="rows",
    seed=0,
    prompt_seed=0,
    epochs=2,
    islands=2,
    tp_size=1,
    batch_size=1,
    accumulation=2,
)
SPEC = CaptureSpec(
    method="dspark",
    layer_ids=(0, 1),
    final_state=True,
    dtype="float32",
    hidden_size=4,
    vocab_size=8,
    target_revision="tiny",
    tokenizer_hash="tiny",
)


def ref_of(entry: Entry) -> FeatureRef:
    return FeatureRef(entry.key, f"sample-{entry.position}", 3, 12, "float32", 2, (1, 2), "hash")


def capture(producer: Ledger, step: int) -> list[Entry]:
    """Plan and commit a whole window."""
    entries = producer.plan_window(step, PLAN.window(step - 1))
    assert producer.commit(map(ref_of, entries), [entry.task for entry in entries]) == []
    return entries
