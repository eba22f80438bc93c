import pytest
import torch._inductor.config as inductor_config

from specforge_kernels.inductor import keep_aten_gemms


@pytest.mark.parametrize(("before", "after"), [("TRITON", "ATEN,TRITON"), ("TRITON,ATEN", "TRITON,ATEN")])
def test_aten_is_always_among_the_candidates(before: str, after: str) -> None:
    with inductor_config.patch(max_autotune_gemm_backends=before):
        assert keep_aten_gemms() == after
        assert inductor_config.max_autotune_gemm_backends == after
