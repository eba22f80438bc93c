"""What our hooks take for granted, looked up in the sources of every supported SGLang."""

import ast
from functools import cache
from pathlib import Path

import pytest

from specforge_capture.sglang import hooks
from specforge_capture.sglang.options import REFUSED
from specforge_capture.sglang.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[4]
SOURCES = ROOT / ".cache" / "sglang-sources"

PARAMETERS = {
    hooks.OPTIONS: ["parser"],
    hooks.PARSE: ["cls", "args"],
    hooks.OPEN: ["server_args", "tokenizer_manager", "template_manager", "port_args", "scheduler_infos"],
    hooks.LOAD: ["self"],
    hooks.FORWARD: ["self", "batch"],
    hooks.ENQUEUE: ["self", "req"],
    hooks.ABORT: ["self", "recv_req"],
    hooks.INFORM: ["self"],
    hooks.RECEIVE: ["self"],
    hooks.STREAM: ["self", "reqs", "return_logprob", "skip_req"],
}
"""First parameters of the hooked functions, by position."""

REQUEST = {
    "rid", "origin_input_ids", "sampling_params", "stream", "input_embeds", "multimodal_inputs", "session",
    "lora_id", "extra_key", "to_finish", "finished_reason", "customized_info", "skip_radix_cache_insert",
}  # fmt: skip
"""Attributes of `Req` that the scheduler's hooks read or set."""


@pytest.fixture(scope="module", params=SUPPORTED)
def sources(request: pytest.FixtureRequest) -> Path:
    """The folder `sglang` of one version."""
    folder = SOURCES / request.param / "sglang"
    if not folder.is_dir():
        raise pytest.skip.Exception("needs the sources of SGLang: python3 scripts/sglang_sources.py")
    return folder


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def member(body: list[ast.stmt], name: str) -> ast.stmt:
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = [node for node in body if isinstance(node, kinds) and node.name == name]
    assert found, f"no {name}"
    return found[-1]


def class_of(file: Path, name: str) -> ast.ClassDef:
    found = member(tree(file).body, name)
    assert isinstance(found, ast.ClassDef)
    return found


def fields(body: list[ast.stmt]) -> set[str]:
    return {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("target", hooks.IN_SERVER + hooks.IN_SCHEDULER)
def test_a_hooked_function_is_there_with_the_parameters_that_its_hook_takes(
    sources: Path, target: str
) -> None:
    _, *parts = target.split(".")
    file = sources
    while not file.with_suffix(".py").is_file():
        file, parts = file / parts[0], parts[1:]
    body: list[ast.stmt] = tree(file.with_suffix(".py")).body
    node: ast.stmt | None = None
    for part in parts:
        node = member(body, part)
        assert isinstance(node, ast.ClassDef | ast.FunctionDef)
        body = node.body
    assert isinstance(node, ast.FunctionDef)
    names = [argument.arg for argument in node.args.args]
    assert names[: len(PARAMETERS[target])] == PARAMETERS[target]


def test_the_arguments_that_captures_depend_on_are_arguments_of_the_server(sources: Path) -> None:
    files = [sources / "srt" / "server_args.py", *(sources / "srt" / "arg_groups").glob("**/*.py")]
    classes = [node for file in files for node in tree(file).body if isinstance(node, ast.ClassDef)]
    known = {name for node in classes for name in fields(node.body)}
    assert {*REFUSED, "disable_prefill_cuda_graph", "model_path"} <= known


def test_requests_and_batches_have_what_the_hooks_read(sources: Path) -> None:
    file = sources / "srt" / "managers" / "schedule_batch.py"
    request = {
        node.attr
        for node in ast.walk(class_of(file, "Req"))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    assert request >= REQUEST
    assert fields(class_of(file, "ScheduleBatch").body) >= {"reqs", "prefix_lens", "extend_lens"}
    assert ast.unparse(class_of(file, "FINISH_ABORT")).count("message=None, status_code=None, err_type=None")
