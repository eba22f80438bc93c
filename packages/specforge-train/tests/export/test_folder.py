import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafts import make_shape

from specforge_train.export.folder import check_export, load_exported
from specforge_train.export.sglang import export_sglang
from specforge_train.export.speculators import export_speculators
from specforge_train.methods.base import Verifier
from specforge_train.methods.dspark import DSpark

METHOD = DSpark()


def built(shape):
    model = METHOD.build(shape)
    model.init_weights(0)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export that is complete."""
    shape = make_shape()
    path = export_sglang(built(shape).state_dict(), shape, tmp_path / "export")
    check_export(path)
    return path


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of `config.json`; None takes one away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def change_weights(folder: Path, **tensors: torch.Tensor) -> None:
    """Replace tensors, whose names have `__` for a dot."""
    state = load_file(folder / "model.safetensors")
    state |= {name.replace("__", "."): value for name, value in tensors.items()}
    save_file(state, folder / "model.safetensors")


def shard(folder: Path) -> dict[str, str]:
    """Spread the weights over two files and an index, whose map is returned."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(state))}
    for file in sorted(set(places.values())):
        save_file({name: state[name] for name in state if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_what_differs_from_the_configuration_is_listed(tmp_path: Path) -> None:
    shape = make_shape()
    folder = export_sglang(built(shape).state_dict(), shape, tmp_path / "export")
    state = load_file(folder / "model.safetensors")
    state["norm.bias"] = state.pop("norm.weight")
    state["fc.weight"] = state["fc.weight"][:, :16].contiguous()
    save_file(state, folder / "model.safetensors")
    for check in (check_export, load_exported):
        with pytest.raises(ValueError) as error:
            check(folder)
        assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
            "norm.weight is missing, required [16]",
            "norm.bias is [16], required no such tensor",
            "fc.weight is [16, 16], required [16, 32]",
        ]


@pytest.mark.parametrize("field", ["target_layer_ids", "mask_token_id", "markov_rank", "num_target_layers"])
def test_a_field_that_is_lost_is_named(field: str, tmp_path: Path) -> None:
    shape = make_shape()
    folder = export_sglang(built(shape).state_dict(), shape, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    config.pop(field, None)
    config["dflash_config"].pop(field, None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"lacks {field}"):
        check_export(folder)


def test_an_incomplete_state_leaves_the_older_export(tmp_path: Path) -> None:
    shape = make_shape()
    state = built(shape).state_dict()
    folder = export_sglang(state, shape, tmp_path / "export", torch.float32)
    with pytest.raises(ValueError, match=r"fc\.weight is missing"):
        export_sglang({name: x for name, x in state.items() if name != "fc.weight"}, shape, folder)
    assert torch.equal(load_exported(folder)[1]["fc.weight"], state["fc.weight"])
    changed = {name: x + 1 for name, x in state.items()}
    export_sglang(changed, shape, folder, torch.float32)
    assert torch.equal(load_exported(folder)[1]["fc.weight"], changed["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something other than an exported draft"):
        export_sglang(built(make_shape()).state_dict(), make_shape(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="no exported draft"):
        check_export(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 600, -1])
def test_a_file_that_was_cut_short_is_named(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    for check in (check_export, load_exported):
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
            check(folder)


def test_shards_are_read_by_their_index(folder: Path) -> None:
    whole = load_exported(folder)[1]
    shard(folder)
    check_export(folder)
    state = load_exported(folder)[1]
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_missing_and_foreign_shards_are_named(folder: Path) -> None:
    places = shard(folder)
    stray, second = folder / "model.safetensors", folder / "model-00002-of-00002.safetensors"
    save_file({"x": torch.zeros(1)}, stray)
    with pytest.raises(ValueError, match=r"model\.safetensors is not expected: an engine would load it too"):
        check_export(folder)
    stray.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places | {"norm.bias": second.name}}))
    with pytest.raises(ValueError, match=r"norm\.bias is in no shard, \S+ places it in model-00002"):
        check_export(folder)
    second.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        check_export(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_before_and_after(folder: Path, value: float) -> None:
    before = (folder / "model.safetensors").read_bytes()
    shape, state = load_exported(folder)
    broken = state | {"norm.weight": torch.where(torch.arange(16) < 3, value, 1.0)}
    message = r"norm\.weight holds 3 NaN or infinite values of 16 as bfloat16"
    with pytest.raises(ValueError, match=message):
        export_sglang(broken, shape, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    change_weights(folder, norm__weight=broken["norm.weight"].bfloat16())
    for check in (check_export, load_exported):
        with pytest.raises(ValueError, match=message):
            check(folder)


def test_values_too_large_for_the_type_are_refused(folder: Path) -> None:
    shape, state = load_exported(folder)
    with pytest.raises(ValueError, match=r"norm\.weight holds 16 NaN or infinite values of 16 as float16"):
        export_sglang(state | {"norm.weight": torch.full((16,), 7e4)}, shape, folder, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_another_type_than_the_configurations_is_refused(folder: Path, dtype: torch.dtype) -> None:
    change_weights(folder, norm__weight=torch.ones(16).to(dtype))
    with pytest.raises(ValueError, match=r"norm\.weight is \w+, required bfloat16, the dtype of"):
        check_export(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"markov_rank": 8}, "markov_rank 256 in dflash_config and 8 elsewhere"),
        ({"dspark_config": {"mask_token_id": 3}}, "mask_token_id 3 in dspark_config and 39 elsewhere"),
        ({"markov_rank": None}, "markov_rank is missing at the top level"),
        ({"confidence_head_with_markov": None}, "confidence_head_with_markov is missing at the top level"),
        ({"is_causal": True}, "is_causal is True, required False"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"layers\.2\.mlp\.up_proj\.weight is missing"),
        ({"num_hidden_layers": 1, "layer_types": None}, r"layers\.1\.\S+ is \[16\], required no such tensor"),
        ({"head_dim": 16, "num_attention_heads": 2}, r"q_norm\.weight is \[8\], required \[16\]"),
        ({"vocab_size": 41}, r"markov_w1\.weight is \[40, 256\], required \[41, 256\]"),
        ({"dtype": "float16"}, r"fc\.weight is bfloat16, required float16"),
        ({"layer_types": ["sliding_attention"] * 2}, "lacks sliding_window"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, "use_sliding_window is not true"),
    ],
)
def test_a_configuration_that_an_engine_would_misread_is_refused(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=message):
        check_export(folder)


@pytest.mark.parametrize(("text", "message"), [('{"a": 1', "is not valid JSON"), ("[]", "holds a list")])
def test_a_configuration_that_is_none_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        check_export(folder)


def test_drafts_with_fields_in_one_section_alone_are_read_but_not_passed(folder: Path) -> None:
    """As SpecForge writes them: a warm start takes them, SGLang would miss the heads."""
    config = json.loads((folder / "config.json").read_text())
    change_config(folder, **{name: None for name in config["dflash_config"] if name != "block_size"})
    assert load_exported(folder)[0].config.markov.rank == 256
    with pytest.raises(ValueError, match="markov_head_type is missing at the top level"):
        check_export(folder)


def test_the_layout_of_speculators_is_checked_alike(tmp_path: Path) -> None:
    shape = make_shape()
    state = built(shape).state_dict()
    folder = export_speculators(state, shape, tmp_path / "export", Verifier("some/target", ("Some",)))
    assert check_export(folder).layer_ids == shape.layer_ids
    change_weights(folder, fc__weight=torch.zeros(16, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"fc\.weight is \[16, 16\], required \[16, 32\]"):
        check_export(folder)
