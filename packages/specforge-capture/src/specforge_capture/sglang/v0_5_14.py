"""SGLang 0.5.14: a `ModelRunner` takes its ranks one by one, a `Req` counts what it fills."""

from array import array
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.utils import require_mlp_sync

from specforge_capture.sglang.islands import Place


def make_runner(server_args: Any, place: Place) -> ModelRunner:
    """See `Adapter`."""
    set_global_server_args_for_scheduler(server_args)
    initialize_moe_config(server_args)
    initialize_fp8_gemm_config(server_args)
    initialize_fp4_gemm_config(server_args)
    return ModelRunner(
        model_config=ModelConfig.from_server_args(server_args),
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=place.gpu_id,
        tp_rank=place.tp_rank,
        tp_size=server_args.tp_size,
        moe_ep_rank=place.tp_rank // (server_args.tp_size // server_args.ep_size),
        moe_ep_size=server_args.ep_size,
        pp_rank=0,
        pp_size=1,
        nccl_port=0,
        server_args=server_args,
    )


def set_whole_prompt(request: Any, length: int) -> None:
    """See `Adapter`."""
    request.full_untruncated_fill_ids = array("q", request.origin_input_ids)
    request.fill_len = request.extend_input_len = length
    request.logprob_start_len = length - 1


def make_forward_batch(batch: Any, runner: Any) -> ForwardBatch:
    """See `Adapter`."""
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    return ForwardBatch.init_new(batch, runner)


def syncs_over_dp(server_args: Any) -> bool:
    """See `Adapter`."""
    return require_mlp_sync(server_args)
