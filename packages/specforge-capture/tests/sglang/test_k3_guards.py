"""The patched Kimi K3 kernels beside the released ones: on a GPU, or through Triton's interpreter.

SGLang itself cannot be imported without its GPU packages. The functions under test are cut out of its sources
by name, as released and with our patches applied: tested is the text that a patched installation holds.
References are float64.
"""

import ast
import importlib.util
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specforge_capture.patching import PATCHES, PatchSet

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
VERSIONS = ("0.5.18", "0.5.23")
TOPK_SUM_CUDA = "sglang/kernels/jit/csrc/moe/topk_sum.cuh"
SOURCES = Path(__file__).resolve().parents[4] / ".cache" / "sglang-sources"

pytestmark = pytest.mark.skipif(
    not all((SOURCES / version / TOPK_SUM_CUDA).is_file() for version in VERSIONS),
    reason="needs the sources of SGLang: python3 scripts/sglang_sources.py",
)

ATTN_RESIDUAL = "sglang/srt/layers/attn_residual.py"
ROCM = {
    "0.5.18": "sglang/kernels/ops/kimi_k3/attn_res_hip.py",
    "0.5.23": "sglang/kernels/ops/attention/attn_res_hip.py",
}
MARLIN = "sglang/srt/layers/moe/fused_moe_triton/fused_marlin_moe.py"
TOPK_SUM = "sglang/kernels/ops/moe/moe_topk_sum.py"

H = 2048
"""Two of the kernels' blocks; Kimi K3 has seven, for which the interpreter takes long."""
EPS = 1e-5
LIMIT = 3.3e38
"""Just under bf16's largest finite number."""

one_version = pytest.mark.parametrize("version", ["0.5.18"], indirect=True)
"""For what test_versions_share_the_patched_kernels makes true of the others."""
runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a GPU or TRITON_INTERPRET=1 (test_guards_in_the_interpreter)",
)
Cut = Callable[..., Any]

HEADER = """\
from __future__ import annotations
from functools import cache
from typing import Optional
import torch
import triton
import triton.language as tl

def is_npu():
    return False

"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="is the outer one")
def test_guards_in_the_interpreter() -> None:
    """The interpreter is chosen before Triton is imported: in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "--noconftest", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) == 13, done.stdout


def test_versions_share_the_patched_kernels(version: str) -> None:
    """Then what is shown of one version's arithmetic holds of each."""
    texts = [
        _text(each, RESIDUALS | {ROCM[each]: ("_agg_kernel", "attn_res_hip")}, patched=True)
        for each in (VERSIONS[0], version)
    ]
    without_comments = [re.sub(" *#.*", "", text) for text in texts]
    assert without_comments[0] == without_comments[1]


def _functions(text: str, names: tuple[str, ...]) -> str:
    """The named functions of a source text, and its literal constants; names that it lacks are left out."""
    lines = text.splitlines(keepends=True)
    parts = []
    for node in ast.parse(text).body:
        wanted = isinstance(node, ast.FunctionDef) and node.name in names
        constant = isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Call)
        if wanted or constant:
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            parts.append("".join(lines[first - 1 : node.end_lineno]))
    return "\n\n".join(parts)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


def _text(version: str, wanted: dict[str, tuple[str, ...]], *, patched: bool) -> str:
    """The functions `wanted` of each file of the release."""
    text = ""
    for path, names in wanted.items():
        content = (SOURCES / version / path).read_bytes()
        if patched:
            content = PatchSet(PATCHES / version).content(path, content, "patched")
        text += _functions(content.decode(), names) + "\n\n"
    return text


@pytest.fixture
def cut(version: str, tmp_path: Path) -> Cut:
    """Makes a module of functions of the release's files; a file, since Triton reads its kernels' source."""

    def make(wanted: dict[str, tuple[str, ...]], *, patched: bool) -> Any:
        path = tmp_path / f"{'patched' if patched else 'stock'}.py"
        path.write_text(HEADER + _text(version, wanted, patched=patched))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


RESIDUALS = {
    ATTN_RESIDUAL: (
        "get_cw",
        "_scale_for_squares",
        "_score_kernel",
        "_combine_kernel",
        "_rescale_kernel",
        "_mix_fused",
        "_aggregate_fused",
    )
}


def _rocm(version: str) -> dict[str, tuple[str, ...]]:
    return {
        ATTN_RESIDUAL: ("_scale_for_squares",),
        ROCM[version]: ("supports_attn_res_hip", "_tile_size", "_agg_kernel", "attn_res_hip"),
    }


def _rows(tokens: int) -> SimpleNamespace:
    """prefix [T, H], bank [T, 1, H] in bf16 of ordinary size, and the weights of one aggregation point."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return SimpleNamespace(
        prefix=normal(tokens, H).bfloat16().to(DEVICE),
        bank=normal(tokens, 1, H).bfloat16().to(DEVICE),
        proj=SimpleNamespace(weight=(normal(1, H) / H**0.5).to(DEVICE)),
        norm=SimpleNamespace(weight=(1 + normal(H) / 8).to(DEVICE), variance_epsilon=EPS),
        out_weight=(1 + normal(H) / 8).to(DEVICE),
    )


def _mixture(rows: SimpleNamespace) -> Tensor:
    """The aggregation by its definition, in float64: softmax over the scores of RMS-normed rows, [T, H]."""
    stream = torch.cat([rows.bank, rows.prefix[:, None]], dim=1).double()
    weight = (rows.norm.weight * rows.proj.weight[0]).double()
    scores = (rms_norm(stream, (H,), eps=EPS) * weight).sum(-1)
    return (scores.softmax(-1)[..., None] * stream).sum(1)


def _normed(rows: SimpleNamespace) -> Tensor:
    return rms_norm(_mixture(rows), (H,), rows.out_weight.double(), EPS)


def _out_norm(rows: SimpleNamespace) -> Callable[[Tensor], Tensor]:
    """Stands for SGLang's CUDA kernel of RMSNorm, which sums plain squares in fp32 likewise."""
    return lambda x: rms_norm(x.float(), (H,), rows.out_weight, EPS).to(x.dtype)


def _run_pair(module: Any, rows: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """The mixture and its normed form, by the pair of Triton kernels."""
    mixture = module._mix_fused(rows.prefix, rows.bank, rows.bank.shape[1], rows.proj, rows.norm)
    module._mix_fused = lambda *arguments: mixture.clone()
    return mixture, module._aggregate_fused(*[None] * 5, _out_norm(rows))


def _run_rocm(module: Any, rows: SimpleNamespace, *, normed: bool = True) -> Tensor:
    """The kernel for ROCm, which does all in one launch; Triton's language has no device in it."""
    out = torch.empty_like(rows.prefix)
    cw = rows.norm.weight * rows.proj.weight[0]
    ow = rows.out_weight if normed else None
    module.attn_res_hip(rows.prefix, rows.bank, cw, ow, out, rows.bank.shape[1], EPS, EPS)
    return out


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Within bf16's resolution of the row's scale: the sum of a row's terms is rounded once."""
    scale = wanted.abs().amax(-1, keepdim=True)
    return bool(((found.double() - wanted).abs() <= 2**-7 * scale).all())


def _rows_near_the_limit(*, aligned: bool) -> SimpleNamespace:
    """Two tokens: near bf16's limit is the bank row of one, the prefix of the other.

    `aligned` gives them the signs of the weights, so that the products add up too.
    """
    rows = _rows(2)
    cw = rows.norm.weight * rows.proj.weight[0]
    for row in (rows.bank[0, 0], rows.prefix[1]):
        sign = cw.sign() if aligned else row.sign()
        row.copy_(sign * LIMIT * torch.linspace(0.3, 1, H, device=DEVICE))
    return rows


@runs_kernels
@one_version
def test_ordinary_rows_keep_their_bits(cut: Cut, version: str) -> None:
    rows = _rows(2)
    rows.bank[0] *= 2**20
    rows.prefix[1] *= 2**50
    stock, patched = (_run_pair(cut(RESIDUALS, patched=patched), rows) for patched in (False, True))
    assert torch.equal(patched[0], stock[0])
    assert torch.equal(patched[1], stock[1])
    stock_rocm, patched_rocm = (
        _run_rocm(cut(_rocm(version), patched=patched), rows) for patched in (False, True)
    )
    assert torch.equal(patched_rocm, stock_rocm)


@runs_kernels
@one_version
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "mixed-signs"])
def test_rows_near_the_limit_are_scored_and_normed_right(cut: Cut, version: str, aligned: bool) -> None:
    rows = _rows_near_the_limit(aligned=aligned)
    mixture, normed = _run_pair(cut(RESIDUALS, patched=True), rows)
    assert _near(mixture, _mixture(rows))
    assert _near(normed, _normed(rows))
    assert _near(_run_rocm(cut(_rocm(version), patched=True), rows), _normed(rows))

    stock, stock_normed = _run_pair(cut(RESIDUALS, patched=False), rows)
    stock_rocm = _run_rocm(cut(_rocm(version), patched=False), rows)
    for found, wanted in (
        (stock, _mixture(rows)),
        (stock_normed, _normed(rows)),
        (stock_rocm, _normed(rows)),
    ):
        for token in (0, 1):
            if aligned:  # both the squares and the products pass fp32: inf * 0
                assert not found[token].isfinite().all()
            else:  # the squares alone: a score of 0, so a finite mixture of wrong weights
                assert not _near(found[token], wanted[token])


def _address_space(elements: int) -> Tensor:
    """bf16 zeros; on the CPU anonymous memory, of which only the pages that are written are allocated."""
    if DEVICE == "cuda":
        return torch.zeros(elements, dtype=torch.bfloat16, device=DEVICE)
    no_reserve = 0x4000  # Linux's MAP_NORESERVE: not counted against the memory there is
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.bfloat16)


def _spread(rows: Tensor, decoy: Tensor) -> Tensor:
    """A view of the rows [3, ...] with 2^30 elements from one to the next: the last is 2^31 after the first.

    Where 32 bits wrap around, 2^31 before the first, lies `decoy`. In a 64K bank tokens 0 and 37,450 are that
    far apart. Shown is a kernel's address arithmetic at that distance, on memory that is there, though with
    three tokens instead of 64K.
    """
    space = _address_space(2**32 + rows[0].numel())
    strides = (2**30, *rows.stride()[1:])
    view = space.as_strided(rows.shape, strides, storage_offset=2**31)
    view.copy_(rows)
    space[: decoy.numel()].copy_(decoy.flatten())
    return view


@runs_kernels
def test_offsets_past_31_bits(cut: Cut, version: str) -> None:
    rows = _rows(3)
    generator = torch.Generator().manual_seed(1)
    decoy = torch.randn(1, H, generator=generator).bfloat16().to(DEVICE)
    wanted = _mixture(rows)
    rows.bank = _spread(rows.bank, decoy)
    overflows = version == "0.5.18"  # 0.5.23 has 64 bits in the residual kernels
    for patched in (True, False):
        pair = _run_pair(cut(RESIDUALS, patched=patched), rows)[0]
        rocm = _run_rocm(cut(_rocm(version), patched=patched), rows, normed=False)
        for found in (pair, rocm):
            assert _near(found[:2], wanted[:2])
            assert _near(found[2], wanted[2]) == (patched or not overflows)
    if overflows:
        rows.bank = torch.cat([rows.bank[:2], decoy[None]])
        assert _near(pair, _mixture(rows))


@runs_kernels
def test_offsets_of_the_activation_past_31_bits(cut: Cut) -> None:
    wanted = {MARLIN: ("_tl_tanh", "_situ_and_mul_kernel", "situ_and_mul")}
    generator = torch.Generator().manual_seed(2)
    x, decoy = (torch.randn(n, 96, generator=generator).bfloat16().to(DEVICE) for n in (3, 1))
    gate, up = x.double().chunk(2, dim=-1)
    right = 4 * (gate / 4).tanh() * gate.sigmoid() * 2 * (up / 2).tanh()
    spread = _spread(x, decoy)
    for patched in (True, False):
        out = torch.empty(3, 48, dtype=torch.bfloat16, device=DEVICE)
        cut(wanted, patched=patched).situ_and_mul(out, spread, situ_beta=4.0, linear_beta=2.0)
        assert _near(out[:2], right[:2])
        assert _near(out[2], right[2]) == patched


@runs_kernels
def test_no_device_takes_the_kernel_that_sums_plain_squares(cut: Cut) -> None:
    fast = {}
    for patched in (True, False):
        module = cut({ATTN_RESIDUAL: ("_use_fast", "_supports_attn_res_tma")}, patched=patched)
        module.is_cuda = lambda: True
        module.torch = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda: (10, 0)))
        fast[patched] = module._use_fast(7168)
    assert fast == {True: False, False: True}


@runs_kernels
def test_more_tokens_than_a_grid_has_rows(cut: Cut, version: str) -> None:
    assert re.search(r"dim3 grid\([^;]+, M\);", (SOURCES / version / TOPK_SUM_CUDA).read_text())
    x = torch.arange(65_537.0).expand(8, 2, -1).permute(2, 1, 0).bfloat16().contiguous()

    def run(part: Tensor, out: Tensor) -> None:
        """Stands for the CUDA kernel: the same sum, under CUDA's limit of grid.y."""
        if part.shape[0] > 65_535:
            raise RuntimeError("invalid configuration argument")
        out.copy_(part.float().sum(1))

    sums = {}
    for patched in (True, False):
        module = cut({TOPK_SUM: ("moe_topk_sum",)}, patched=patched)
        module._jit_topk_sum_module = lambda: SimpleNamespace(run=run)
        sums[patched] = module.moe_topk_sum
    out = torch.full((65_537, 8), float("nan"), dtype=torch.bfloat16)
    assert torch.equal(sums[True](x, out), x.float().sum(1).bfloat16())
    with pytest.raises(RuntimeError, match="invalid configuration"):
        sums[False](x, out)
