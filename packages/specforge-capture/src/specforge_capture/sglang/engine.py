"""One SGLang engine in this process: a `ModelRunner` without scheduler, sampler or server.

A prefill packs whole prompts of any lengths into one forward, without padding. Invariant: the token and
request pools are empty between prefills, so that nothing is reused and nothing leaks.
"""

import difflib
import inspect
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from specforge_capture.memory import naming_budgets
from specforge_capture.sglang.islands import Place, virtual_world
from specforge_capture.sglang.versions import Adapter
from specforge_capture.startup import Startup

_START_BUDGETS = (
    "raise engine.tp_size, so that more ranks share the weights; lower engine.max_total_tokens, "
    "training.batch_size or data.max_length, which size the token pool; or raise engine.mem_fraction_static, "
    "if it is what SGLang ran into"
)
_CAPTURE_BUDGETS = (
    "lower training.batch_size or data.max_length, of which an island captures tp_size * batch_size rows at "
    "once; or engine.max_total_tokens or engine.mem_fraction_static, if its pool is larger than that needs"
)


class Engine:
    """The engine of this rank's island.

    Args:
        adapter: of the installed version.
        keywords: of `ServerArgs`.
        place: where the rank stands.
        startup: what the start's time is noted in.

    Raises:
        ValueError: for arguments that this SGLang does not know, and pools smaller than asked for.
    """

    def __init__(self, adapter: Adapter, keywords: Mapping[str, Any], place: Place, startup: Startup) -> None:
        _require_known(keywords)
        self._adapter = adapter
        with startup.part("arguments"):
            server_args = ServerArgs(**keywords)
        with virtual_world(place.topology), naming_budgets("starting the engine", _START_BUDGETS):
            with startup.part("process groups and weights"):
                self.runner = adapter.make_runner(server_args, place)
            with startup.part("token pool"):
                self.runner.alloc_memory_pool()
            with startup.part("attention backend"):
                self.runner.init_attention_backends()
                self.runner.init_cuda_graphs()
        if adapter.syncs_over_dp(server_args):
            raise ValueError(
                "engine: these arguments make a prefill wait for data-parallel ranks (an all-to-all of "
                "experts, or data-parallel attention); required: experts inside the island, by engine.ep_size"
            )
        self.token_slots = self.runner.max_total_num_tokens
        """Tokens that one prefill can hold."""
        if self.token_slots < keywords["max_total_tokens"]:
            raise ValueError(
                f"the engine's pool has room for {self.token_slots} tokens; required: "
                f"{keywords['max_total_tokens']} (engine.max_total_tokens): raise "
                "engine.mem_fraction_static, or lower training.batch_size or data.max_length"
            )
        self._cache = self._unused_cache()

    @property
    def model(self) -> Any:
        """SGLang's model."""
        return self.runner.model

    @property
    def group(self) -> Any:
        """The gloo process group of the island's ranks."""
        return get_tp_group().cpu_group

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run the model over prompts, packed in their order. A collective of the island."""
        runner = self.runner
        batch = ScheduleBatch.init_new(
            reqs=[self._request(index, prompt) for index, prompt in enumerate(prompts)],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=self._cache,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:  # a scheduler would upload them on its forward stream
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device, non_blocking=True)
            batch.prefill_input_ids_cpu = None
        with naming_budgets(f"capturing {sum(map(len, prompts))} tokens", _CAPTURE_BUDGETS):
            runner.forward(self._adapter.make_forward_batch(batch, runner))
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()

    def _request(self, index: int, prompt: Sequence[int]) -> Any:
        request = Req(
            rid=str(index),
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        self._adapter.set_whole_prompt(request, len(prompt))
        return request

    def _unused_cache(self) -> Any:
        return RadixCache(
            CacheInitParams(
                disable=True,
                req_to_token_pool=self.runner.req_to_token_pool,
                token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
                page_size=self.runner.page_size,
            )
        )


def _require_known(keywords: Mapping[str, Any]) -> None:
    known = list(inspect.signature(ServerArgs).parameters)
    for name in keywords:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; the nearest is {nearest[0]}" if nearest else ""
            raise ValueError(f"engine.extra.{name}: this SGLang has no such argument{hint}")
