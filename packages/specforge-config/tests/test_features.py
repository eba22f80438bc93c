import hashlib
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from specforge_config.features import CaptureSpec, FeatureBatch, spec_hash


def spec(**changes: Any) -> CaptureSpec:
    fields = {
        "method": "dspark",
        "layer_ids": (1, 3),
        "final_state": True,
        "dtype": "float32",
        "hidden_size": 4,
        "vocab_size": 32,
        "target_revision": "r",
        "tokenizer_hash": "t",
    }
    return CaptureSpec.model_validate(fields | changes)


def test_equal_contracts_agree() -> None:
    spec().require_equal(spec(), here="this run", there="the checkpoint")
    assert CaptureSpec.model_validate_json(spec().model_dump_json()) == spec()


def test_a_hash_names_the_contract() -> None:
    # Of the JSON text itself, so that a stored hash outlives a change of the code.
    text = (
        '{"dtype":"float32","final_state":true,"hidden_size":4,"layer_ids":[1,3],"method":"dspark",'
        '"schema_version":1,"target_revision":"r","tokenizer_hash":"t","vocab_size":32}'
    )
    assert spec_hash(spec()) == hashlib.sha256(text.encode()).hexdigest()
    assert spec_hash(spec()) != spec_hash(spec(layer_ids=(3, 1)))


def test_every_difference_is_told_with_both_values() -> None:
    with pytest.raises(ValueError) as caught:
        spec().require_equal(
            spec(layer_ids=(3, 1), dtype="bfloat16"), here="this run", there="the checkpoint"
        )
    assert str(caught.value).splitlines() == [
        "the capture contracts of this run and the checkpoint differ:",
        "  layer_ids: (1, 3) (this run) != (3, 1) (the checkpoint)",
        "  dtype: 'float32' (this run) != 'bfloat16' (the checkpoint)",
    ]


def batch(**changes: Any) -> FeatureBatch:
    torch = pytest.importorskip("torch")
    fields: dict[str, Any] = {
        "tokens": torch.arange(5),
        "loss_mask": torch.ones(5, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "hidden": torch.zeros(5, 8),
        "last_hidden": torch.zeros(5, 4),
        "sample_ids": ("a", "b"),
        "positions": ((0, 0), (0, 1)),
        "spec": spec(),
    }
    return FeatureBatch(**{**fields, **{name: make(torch) for name, make in changes.items()}})


def test_whole_captures_are_taken() -> None:
    assert batch().state_bytes == 5 * 12 * 4
    bare: Any = batch(spec=lambda _: spec(final_state=False), last_hidden=lambda _: None)
    assert bare.state_bytes == 5 * 8 * 4
    with pytest.raises(FrozenInstanceError):
        bare.tokens = None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"hidden": lambda torch: torch.zeros(4, 8)}, r"hidden is \(4, 8\), required \(5, 8\)"),
        ({"hidden": lambda torch: torch.zeros(5, 4)}, r"hidden is \(5, 4\), required \(5, 8\)"),
        ({"last_hidden": lambda torch: None}, r"last_hidden is None, required \(5, 4\)"),
        ({"last_hidden": lambda torch: torch.zeros(5, 3)}, r"last_hidden is \(5, 3\), required \(5, 4\)"),
        ({"spec": lambda torch: spec(final_state=False)}, r"last_hidden is \(5, 4\), required None"),
        ({"loss_mask": lambda torch: torch.ones(3)}, r"loss_mask is \(3,\), required \(5,\)"),
        ({"positions": lambda torch: ((0, 0),)}, r"positions is \(1,\), required \(2,\)"),
        ({"cu_seqlens": lambda torch: torch.tensor([0, 5])}, r"cu_seqlens is \(2,\), required \(3,\)"),
        ({"cu_seqlens": lambda torch: torch.tensor([0, 2, 4])}, r"cu_seqlens is \[0, 2, 4\], required"),
        ({"cu_seqlens": lambda torch: torch.tensor([1, 2, 5])}, r"cu_seqlens is \[1, 2, 5\], required"),
        ({"cu_seqlens": lambda torch: torch.tensor([0, 5, 5])}, r"ascending offsets from 0 to 5"),
    ],
)
def test_partial_captures_are_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=r"capture of \['a', 'b'\]: .*" + fault):
        batch(**changes)
