import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from specforge_config.draft import DSparkConfig, DSparkLossConfig, MarkovConfig
from specforge_config.loading import ConfigError, dump_run, json_schema, load_run

MINIMAL = """\
target: {path: target}
data: {train: train.jsonl}
"""

FULL = """\
name: full
seed: 7
target: {path: target, dtype: bfloat16}
draft:
  method: dspark
  target_layer_ids: [3, 1]
  rope_scaling: {rope_type: yarn, factor: 16}
  markov: {head: rnn, rank: 32}
  loss: {ce: 0.2, l1: 0.8, decay: 3}
data: {train: [train.jsonl, other.jsonl], max_length: 512, prompt_seed: 1}
optimizer: {lr: 5e-5, clip: null}
schedule: {kind: wsd, warmup_ratio: 0.1}
training: {batch_size: null, global_batch_size: 8, sharding: hybrid}
deployment: {trainer: {nproc_per_node: 2, nnodes: 2, rendezvous: "[::1]:29500"}}
evaluation: {prompts: held-out.jsonl, interval: 50}
tracking: {samples: true}
"""

Write = Callable[[str], Path]


def faults(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return str(caught.value).replace(f"{path}:", "line ").splitlines()


def test_defaults_fill_a_minimal_recipe(recipe: Write) -> None:
    config = load_run(recipe(MINIMAL))
    assert config.draft.method == "dspark"
    assert config.folder == "outputs/run"
    assert config.prompt_seed == config.seed == 42
    assert config.batches.global_batch_size == 1


def test_a_run_of_overrides_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    config = load_run(None, ["target.path=target", "data.train=train.jsonl", "seed=3"])
    assert (config.target.path, config.seed) == (str(tmp_path / "target"), 3)
    with pytest.raises(ConfigError, match=r"data\.trian"):
        load_run(None, ["target.path=target", "data.trian=train.jsonl"])


def test_input_paths_lie_beside_the_recipe_then_in_the_working_directory(
    recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("train.jsonl", "here.jsonl"):
        (elsewhere / name).touch()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = recipe("target: {path: ~/target}\ndata: {train: [train.jsonl, here.jsonl, nowhere.jsonl]}\n")
    config = load_run(path)
    assert config.target.path == str(tmp_path / "target")
    beside, here, nowhere = tmp_path / "train.jsonl", elsewhere / "here.jsonl", tmp_path / "nowhere.jsonl"
    assert config.data.train == (str(beside), str(here), str(nowhere))


def test_paths_of_a_recipe_named_relatively_are_absolute(
    recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(MINIMAL)
    monkeypatch.chdir(tmp_path)
    assert load_run("recipe.yaml").data.train == (str(tmp_path / "train.jsonl"),)


@pytest.mark.parametrize("text", [MINIMAL, FULL])
def test_dump_loads_back_equal(recipe: Write, tmp_path: Path, text: str) -> None:
    config = load_run(recipe(text))
    resolved = tmp_path / "outputs" / "resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(dump_run(config))
    again = load_run(resolved)
    assert again == config
    assert dump_run(again) == dump_run(config)
    assert yaml.safe_load(dump_run(config))["optimizer"]["eps"] == 1e-8


def test_overrides_are_yaml_and_the_last_one_wins(recipe: Write) -> None:
    config = load_run(
        recipe(FULL),
        [
            "deployment.trainer.nproc_per_node=4",
            "optimizer.lr=1e-3",
            "optimizer.lr=2e-3",
            "data.train=[other.jsonl]",
            "evaluation.max_prompts=3",
            "draft.markov={head: gated, rank: 8}",
            "schedule.warmup_ratio=",
        ],
    )
    assert config.topology.world_size == 8
    assert config.optimizer.lr == 2e-3
    assert [Path(path).name for path in config.data.train] == ["other.jsonl"]
    assert config.evaluation.max_prompts == 3
    assert config.draft == DSparkConfig(
        target_layer_ids=(3, 1),
        rope_scaling={"rope_type": "yarn", "factor": 16},
        markov=MarkovConfig(head="gated", rank=8),
        loss=DSparkLossConfig(ce=0.2, l1=0.8, decay=3),
    )
    assert config.schedule.warmup_ratio is None


def test_environment_variables_change_nothing(recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(MINIMAL)
    before = load_run(path)
    for name in ("SEED", "SPECFORGE_SEED", "TRAINING__EPOCHS", "EPOCHS", "NAME"):
        monkeypatch.setenv(name, "9")
    assert load_run(path) == before


def test_every_fault_of_a_file_is_listed_with_its_line(recipe: Write) -> None:
    path = recipe(
        """\
        name: demo
        target:
          path: target
          backnd: hf
        draft:
          num_layers: true
          ttt_steps: 3
          block_size: 1
          markov: {rank: "5", head: vanila}
        data:
          train:
            - train.jsonl
            - 3
          max_length: 10
          max_length: 12
        training:
          lr: 6e-4
          epoch: 3
          nonsense: 1
        engine:
          extra: {a: [1]}
        tracking:
        optimizer:
          weight_decay: -1
          lr: .inf
          betas: [0.9, 3]
        schedule: {kind: linear, warmup_steps: 1, warmup_ratio: 0.5}
        """
    )
    training_keys = (
        "epochs, max_steps, batch_size, global_batch_size, dtype, sharding, unsupervised, save_every, "
        "keep_checkpoints, log_every, resume"
    )
    assert faults(path) == [
        "line 4: target.backnd: unknown key; did you mean 'target.backend'?",
        "line 6: draft.num_layers: true found; required: integer",
        "line 7: draft.ttt_steps: unknown key with draft.method dspark; it belongs to draft.method eagle3",
        "line 8: draft.block_size: 1 found; required: greater than or equal to 2",
        "line 9: draft.markov.head: 'vanila' found; required: 'vanilla', 'gated' or 'rnn'; "
        "did you mean 'vanilla'?",
        "line 9: draft.markov.rank: '5' found; required: integer",
        "line 13: data.train[1]: 3 found; required: string",
        "line 15: data.max_length: the key is given twice, first at line 14; drop one of the two",
        "line 17: training.lr: unknown key; did you mean 'optimizer.lr'?",
        "line 18: training.epoch: unknown key; did you mean 'training.epochs'?",
        f"line 19: training.nonsense: unknown key; required: one of {training_keys}",
        "line 21: engine.extra.a: [1] found; required: string or integer or number or boolean",
        "line 22: tracking: null found; required: mapping",
        "line 24: optimizer.weight_decay: -1 found; required: greater than or equal to 0",
        "line 25: optimizer.lr: inf found; required: finite number",
        "line 27: schedule: warmup_steps and warmup_ratio are both set; required: at most one of the two",
    ]


def test_missing_keys_name_their_section(recipe: Write) -> None:
    path = recipe("name: demo\n\ndata:\n  max_length: 3\n")
    assert faults(path) == [
        "line 1: target: missing; it is required",
        "line 3: data.train: missing; it is required",
    ]
    assert faults(recipe("")) == [
        "line 1: data: missing; it is required",
        "line 1: target: missing; it is required",
    ]


def test_faults_across_sections_stand_at_the_key_they_name(recipe: Write) -> None:
    path = recipe(
        MINIMAL + "training:\n  global_batch_size: 3\nengine: {ep_size: 1, attention_backend: fa3}\n"
    )
    assert faults(path, "deployment.trainer.nproc_per_node=2") == [
        "line 4: training.global_batch_size=3 cannot be shared by 2 ranks; "
        "required: a positive multiple of deployment.trainer.nnodes * nproc_per_node",
        "line 5: engine.attention_backend is set, but target.backend hf has no engine; "
        "required: drop engine.attention_backend, or target.backend sglang",
    ]


def test_faults_across_a_section_stand_at_the_key_they_name(recipe: Write) -> None:
    path = recipe(MINIMAL + "optimizer:\n  lr: 1e-3\n  betas: [0, 1]\n")
    assert faults(path) == ["line 5: optimizer: betas is [0.0, 1.0]; required: two numbers in [0, 1)"]


def test_overrides_are_named_in_their_faults(recipe: Write) -> None:
    path = recipe(MINIMAL + "draft: {method: eagle3}\n")
    assert faults(path, "trainng.epochs=2", "draft.ttt_steps=x", "lr=3", "target.path.file=1") == [
        "override 'trainng.epochs=2': trainng: unknown key; did you mean 'training'?",
        "override 'draft.ttt_steps=x': draft.ttt_steps: 'x' found; required: integer",
        "override 'lr=3': lr: unknown key; did you mean 'optimizer.lr'?",
        "override 'target.path.file=1': target.path: {'file': 1} found; required: string",
    ]
    assert faults(path, "draft.method=dsprk") == [
        "override 'draft.method=dsprk': draft.method: 'dsprk' found; "
        "required: 'dspark', 'dflash', 'eagle3'; did you mean 'dspark'?"
    ]


@pytest.mark.parametrize("override", ["training.epochs", "=3", "training.=3", ".epochs=3"])
def test_malformed_overrides_are_refused(recipe: Write, override: str) -> None:
    assert faults(recipe(MINIMAL), override) == [f"override '{override}': required: section.key=value"]


def test_overrides_that_are_no_yaml_are_refused(recipe: Write) -> None:
    (line,) = faults(recipe(MINIMAL), "data.train=[a")
    assert line.startswith("override 'data.train=[a': not valid YAML:")


def test_a_variant_does_not_take_another_ones_keys(recipe: Write) -> None:
    path = recipe(MINIMAL + "deployment:\n  store: somewhere:1\n")
    assert faults(path) == [
        "line 4: deployment.store: unknown key with deployment.mode local_colocated; "
        "it belongs to deployment.mode disaggregated"
    ]


def test_keys_of_several_sections_are_all_proposed(recipe: Write) -> None:
    assert faults(recipe(MINIMAL + "evaluation: {dtype: float32}\n")) == [
        "line 3: evaluation.dtype: unknown key; did you mean 'target.dtype' or 'training.dtype'?"
    ]


def test_schema_describes_every_key() -> None:
    schema = json_schema()
    sections = [schema, *schema["$defs"].values()]
    nameless = [
        f"{section['title']}.{name}"
        for section in sections
        for name, field in section["properties"].items()
        if not field.get("description")
    ]
    assert not nameless
    assert all(section["description"] and section["additionalProperties"] is False for section in sections)


def test_schema_takes_what_recipes_write() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["required"] == ["target", "data"]
    assert {"type": "string"} in schema["$defs"]["DataConfig"]["properties"]["train"]["anyOf"]
    backbone = schema["$defs"]["DSparkConfig"]["properties"]
    assert backbone["num_layers"]["description"] == "Decoder layers of the draft."
    assert len(schema["properties"]["draft"]["oneOf"]) == 3
