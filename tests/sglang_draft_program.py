"""What SGLang's interpreter runs for `test_sglang_export.py`: `sglang_draft_program.py FOLDER...`.

Each FOLDER holds an exported draft, `draft/`, and `given.pt`: documents of captured states, an anchor behind
each, and the target's embedding and head. SGLang loads the draft by its own registry and loader, writes the
states into its key and value pool and drafts a block a document; `drafted.pt` gets its parameters and what it
drafted.

On a CPU SGLang has no kernels for bfloat16 drafts and no verification batches: the block runs in float32, as
an extension of its document by the `torch_native` attention backend.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specforge_capture.sglang.islands import Place
from specforge_capture.sglang.versions import load_adapter
from specforge_capture.startup import Startup

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
# SGLang leaves the confidence head out where verification is static, which is its default.
os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"

from sglang.srt.distributed.parallel_state import destroy_model_parallel
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dspark_components.dspark_config import resolve_runtime_config
from sglang.srt.speculative.dspark_components.dspark_draft import sample_draft_block
from sglang.srt.speculative.dspark_components.dspark_planner import compute_confidence

from specforge_capture.sglang.engine import Engine


@torch.no_grad()
def main(folders: list[Path]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for folder in folders:
        engine = Engine(load_adapter(), arguments(folder / "draft"), Place.of_rank(1, 0), Startup())
        model, given = engine.model, torch.load(folder / "given.pt")
        drafted = {"parameters": {name: value.clone() for name, value in model.named_parameters()}}
        attach(model, given["embedding"], given["head"])
        torch.save(drafted | draft(engine.runner, given), folder / "drafted.pt")
        destroy_model_parallel()  # the next engine builds its groups again
    dist.destroy_process_group()


def arguments(draft: Path) -> dict[str, Any]:
    return {
        "model_path": str(draft),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.5,
        "max_running_requests": 8,
        "max_total_tokens": 1024,
    }


def attach(model: Any, embedding: Tensor, head: Tensor) -> None:
    """Lend the target's two tables to the draft, in SGLang's own modules."""
    modules = VocabParallelEmbedding(*embedding.shape), ParallelLMHead(*head.shape)
    for module, weight in zip(modules, (embedding, head), strict=True):
        module.weight.weight_loader(module.weight, weight)
    model.attach_shared_modules(embed_tokens=modules[0], lm_head=modules[1])


def draft(runner: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    model, documents, anchors = runner.model, given["documents"], given["anchors"]
    settled = resolve_runtime_config(
        draft_hf_config=runner.model_config.hf_config,
        speculative_num_draft_tokens=None,
        target_vocab_size=given["head"].shape[0],
    )
    block, pool = settled.gamma, runner.req_to_token_pool.req_to_token
    positions, places = [], []
    for row, hidden in enumerate(documents):
        length = hidden.shape[0]
        slots = runner.token_to_kv_pool_allocator.alloc(length + block)
        pool[row, : length + block] = slots.to(pool.dtype)
        model.write_target_hidden_kv(
            target_hidden=hidden,
            pool=runner.token_to_kv_pool,
            positions=torch.arange(length),
            cache_loc=slots[:length],
        )
        positions.append(torch.arange(length, length + block))
        places.append(slots[length:])
    ids = torch.full((len(documents), block), settled.mask_token_id)
    ids[:, 0] = anchors
    states = extend(runner, ids, torch.cat(positions), torch.cat(places))
    logits, _ = model.compute_base_logits(states)
    hidden = states.view(*ids.shape, -1)
    drafted = sample_draft_block(
        base_logits=logits.view(*ids.shape, -1),
        anchor_tokens=anchors,
        draft_hidden=hidden,
        sampling_info=None,
        markov_head=model.markov_head,
        device=torch.device("cpu"),
    )
    confidence = compute_confidence(
        draft_hidden=hidden,
        anchor_tokens=anchors,
        draft_tokens=drafted.draft_tokens,
        confidence_head=model.confidence_head,
        markov_head=model.markov_head,
        gamma=block,
    )
    return {"tokens": drafted.draft_tokens, "logits": drafted.corrected_logits, "confidence": confidence}


def extend(runner: Any, ids: Tensor, positions: Tensor, places: Tensor) -> Tensor:
    """States [B·G, H] of a block a document."""
    count, block = ids.shape
    prefixes = positions.view(count, block)[:, 0]
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=count,
        input_ids=ids.flatten(),
        req_pool_indices=torch.arange(count),
        seq_lens=prefixes + block,
        seq_lens_cpu=prefixes + block,
        seq_lens_sum=int(prefixes.sum()) + count * block,
        out_cache_loc=places,
        positions=positions,
        extend_num_tokens=count * block,
        extend_prefix_lens=prefixes,
        extend_prefix_lens_cpu=prefixes.tolist(),
        extend_seq_lens=torch.full((count,), block),
        extend_seq_lens_cpu=[block] * count,
        extend_start_loc=torch.arange(0, count * block, block),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    return runner.forward(batch).logits_output.hidden_states


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
