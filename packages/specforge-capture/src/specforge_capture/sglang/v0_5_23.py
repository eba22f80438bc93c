"""SGLang 0.5.23: the configuration is published to the process, and groups are built before the
`ModelRunner`."""

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
from sglang.srt.utils import require_mlp_sync

from specforge_capture.sglang.islands import Place


def make_runner(server_args: Any, place: Place) -> ModelRunner:
    """See `Adapter`."""
    server_args.resolve_once()
    world_rank = spawn_world_rank(server_args, tp_rank=place.tp_rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=place.gpu_id))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=0)
    bootstrap.init_layer_runtime(model_config=model_config)
    if mambaish_config(model_config) is not None:
        from sglang.kernels.ops.mamba.triton_ops import initialize_mamba_selective_state_update_backend

        initialize_mamba_selective_state_update_backend(server_args)
    return ModelRunner(
        model_config=model_config,
        mem_fraction_static=resolving_view(server_args).mem_fraction_static,
        gpu_id=place.gpu_id,
        nccl_port=0,
        server_args=server_args,
    )


def set_whole_prompt(request: Any, length: int) -> None:
    """See `Adapter`."""
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.extend_end = length


def make_forward_batch(batch: Any, runner: Any) -> ForwardBatch:
    """See `Adapter`."""
    return ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )


def syncs_over_dp(server_args: Any) -> bool:
    """See `Adapter`."""
    return require_mlp_sync()
