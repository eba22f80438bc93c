"""SGLang 0.5.18: ranks travel in a `ParallelState`, a `Req` names the range that it fills."""

from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.dp_attention import compute_dp_attention_world_info
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils import require_mlp_sync

from specforge_capture.sglang.islands import Place


def make_runner(server_args: Any, place: Place) -> ModelRunner:
    """See `Adapter`."""
    initialize_moe_config(server_args)
    initialize_fp8_gemm_config(server_args)
    initialize_fp4_gemm_config(server_args)
    return ModelRunner(
        model_config=ModelConfig.from_server_args(server_args),
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=place.gpu_id,
        ps=_parallel_state(server_args, place),
        nccl_port=0,
        server_args=server_args,
    )


def _parallel_state(args: Any, place: Place) -> ParallelState:
    tp_rank, tp_size = place.tp_rank, args.tp_size
    attn_tp_rank, attn_tp_size, attn_dp_rank, attn_dp_size = compute_dp_attention_world_info(
        args.enable_dp_attention, tp_rank, tp_size, args.dp_size, args.attn_cp_size
    )
    return ParallelState(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        dp_rank=None,
        dp_size=args.dp_size,
        attn_tp_rank=attn_tp_rank,
        attn_tp_size=attn_tp_size,
        attn_cp_rank=0,
        attn_cp_size=args.attn_cp_size,
        attn_dcp_rank=tp_rank % args.dcp_size,
        attn_dcp_size=args.dcp_size,
        attn_dp_rank=attn_dp_rank,
        attn_dp_size=attn_dp_size,
        moe_ep_rank=tp_rank // (tp_size // args.ep_size),
        moe_ep_size=args.ep_size,
        moe_dp_rank=None,
        moe_dp_size=args.moe_dp_size,
        gpu_id=place.gpu_id,
    )


def set_whole_prompt(request: Any, length: int) -> None:
    """See `Adapter`."""
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.set_extend_range(0, length)


def make_forward_batch(batch: Any, runner: Any) -> ForwardBatch:
    """See `Adapter`."""
    return ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )


def syncs_over_dp(server_args: Any) -> bool:
    """See `Adapter`."""
    return require_mlp_sync(server_args)
