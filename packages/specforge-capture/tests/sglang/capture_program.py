"""What each rank of `test_local.py` runs: `capture_program.py RECIPE FOLDER`.

It captures the whole plan through a stream, decodes one sequence, and saves what it saw to FOLDER/rank-R.pt.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specforge_capture.prompts.cache import PromptSet, open_or_build
from specforge_capture.prompts.chat import ChatRenderer, load_tokenizer
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.sglang.engine_args import resolve_engine_arguments
from specforge_capture.sglang.local import SGLangTarget
from specforge_capture.spec import resolve_capture_spec
from specforge_capture.stream import LocalRolloutStream
from specforge_config.features import FeatureBatch
from specforge_config.loading import load_run
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape, read_target_shape


def main(recipe: str, folder: str) -> None:
    config = load_run(recipe)
    shape, renderer = read_target_shape(config.target.path), ChatRenderer(load_tokenizer(config.target.path))
    prompts = open_or_build(config.data, renderer, vocab_size=shape.vocab_size)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    spec = resolve_capture_spec(config, shape, renderer.hash)
    target = SGLangTarget(config, shape, spec, torch.device("cpu"))
    seen: dict[str, Any] = {"groups": groups(), "startup": target.startup.seconds}
    seen["batches"] = batches(config, target, prompts)
    first = dataclasses.replace(
        prompts[0], input_ids=prompts[0].input_ids[:1], loss_mask=prompts[0].loss_mask[:1]
    )
    seen["one token"] = fields(target.capture([first, prompts[1]]))
    with target.decoding() as leads:
        seen["decoded"] = decode(target, prompts) if leads else None
    seen["too long"] = refused(lambda: target.capture([prompts[0]] * 5))
    if dist.get_world_size() == 1:
        seen["views"] = views(config, shape)
    total = torch.ones(1)
    dist.all_reduce(total)
    seen["world"] = int(total)
    torch.save(seen, Path(folder) / f"rank-{rank}.pt")
    target.close()
    dist.destroy_process_group()


def groups() -> dict[str, list[int]]:
    from sglang.srt.distributed import parallel_state as state

    found = {"tp": state.get_tp_group(), "world": state.get_world_group(), "pp": state.get_pp_group()}
    return {name: group.ranks for name, group in found.items()}


def batches(config: RunConfig, target: SGLangTarget, prompts: PromptSet) -> list[dict[str, Any]]:
    plan = PromptPlan.of_run(config, len(prompts), prompts.fingerprint, prompts.lengths)
    island, place = config.topology.island_of(dist.get_rank())
    stream = LocalRolloutStream(target, prompts, plan, island=island, rank=place)
    return [fields(batch) for batch in stream]


def fields(batch: FeatureBatch) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(batch) if field.name != "spec"]
    return {name: getattr(batch, name) for name in names}


def decode(target: SGLangTarget, prompts: PromptSet) -> dict[str, Tensor]:
    """A prompt in two steps, with proposals in between that are taken back."""
    ids = torch.from_numpy(max((prompts[i].input_ids for i in range(len(prompts))), key=len)).long()[:60]
    sequence = target.start()
    steps = [target.extend(ids[:40], sequence)]
    target.extend(ids.flip(0)[:5], sequence)
    target.crop(sequence, 40)
    steps.append(target.extend(ids[40:], sequence))
    logits = torch.cat([step.logits for step in steps])
    return {"ids": ids, "logits": logits, "hidden": torch.cat([step.hidden for step in steps])}


def refused(work: Any) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def views(config: RunConfig, shape: TargetShape) -> dict[str, tuple[Any, Any]]:
    """Where SGLang reads the two views of the arguments as different ones."""
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    arguments = resolve_engine_arguments(config, shape, "cpu")
    mine, served = ServerArgs(**arguments.keywords()), prepare_server_args(arguments.command_line())
    names = [field.name for field in dataclasses.fields(mine)]
    pairs = {name: (repr(getattr(mine, name)), repr(getattr(served, name))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


if __name__ == "__main__":
    main(*sys.argv[1:])
