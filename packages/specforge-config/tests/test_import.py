"""What an import costs, in CPU seconds of a process of its own, which other work hardly changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specforge_config

MEASURE = """
import json, sys, time
clock = [time.process_time()]
import specforge_config
clock.append(time.process_time())
import pydantic, yaml
type("Probe", (pydantic.BaseModel,), {})
clock.append(time.process_time())
config = specforge_config.load_run(sys.argv[1])
clock.append(time.process_time())
heavy = sorted({"torch", "numpy", "transformers", "sglang"} & set(sys.modules))
spent = dict(zip(("import", "dependencies", "load"), (b - a for a, b in zip(clock, clock[1:]))))
print(json.dumps({**spent, "heavy": heavy, "name": config.name}))
"""


def test_importing_is_cheap_and_loads_no_torch(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: cheap\ntarget: {path: t}\ndata: {train: a}\n")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(recipe)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    measured = json.loads(done.stdout)
    assert measured["heavy"] == []
    assert measured["name"] == "cheap"
    assert measured["import"] < 0.3
    assert measured["load"] < 0.6


def test_public_names_are_found_on_first_use() -> None:
    for name in specforge_config.__all__:
        assert getattr(specforge_config, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = specforge_config.nothing
