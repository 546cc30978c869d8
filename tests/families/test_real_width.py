"""Qwen2.5-VL's encoder at its real width and depth, with Inductor, over eight kinds of grid."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Encoder

import hf_compile

GRIDS = (
    [[1, 16, 16]],
    [[1, 20, 28]],
    [[1, 32, 24]],
    [[1, 16, 16], [1, 24, 20]],
    [[2, 12, 14]],
    [[1, 4, 8]],
    [[1, 40, 12]],
    [[2, 8, 8], [3, 4, 4]],
)


def encoder(depth):
    torch.manual_seed(0)
    config = Encoder.config_class(
        depth=depth,
        hidden_size=1280,
        num_heads=16,
        intermediate_size=3420,
        out_hidden_size=2048,
        window_size=112,
        fullatt_block_indexes=[depth // 4 * (index + 1) - 1 for index in range(4)],
    )
    config._attn_implementation = "sdpa"
    return Encoder(config).eval()


def inputs(grid):
    grid = torch.tensor(grid)
    return {"hidden_states": torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 14 * 14), "grid_thw": grid}


def relative(got, want):
    return max(
        float((getattr(got, name).float() - getattr(want, name)).abs().max() / getattr(want, name).abs().max())
        for name in ("last_hidden_state", "pooler_output")
    )


@pytest.fixture(autouse=True)
def both_cores():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.slow
def test_three_graphs_for_32_blocks():
    model = encoder(32)
    calls = [inputs(grid) for grid in GRIDS]
    with torch.no_grad():
        want = [model(**call) for call in calls]
        hf_compile.compile_mm_encoder(model, compilation_config={"fail_on_recompile": True, "strict": True})
        got = [model(**calls[0])]
        torch.compiler.set_stance("fail_on_recompile")
        try:
            got += [model(**call) for call in calls[1:]]
        finally:
            torch.compiler.set_stance("default")
    assert max(map(relative, got, want)) <= 1e-5
    regions = hf_compile.status(model).encoders[0].regions
    assert [(region.class_name, region.instances, region.graphs, region.eager_calls) for region in regions] == [
        ("Qwen2_5_VisionPatchEmbed", 1, 1, 0),
        ("Qwen2_5_VLVisionBlock", 32, 1, 0),
        ("Qwen2_5_VLPatchMerger", 1, 1, 0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_fp32_as_eager(dtype):
    exact, model = encoder(4), encoder(4).to(dtype)
    for grid in (GRIDS[0], GRIDS[3]):
        call = inputs(grid)
        low = {**call, "hidden_states": call["hidden_states"].to(dtype)}
        with torch.no_grad():
            want = exact(**call)
            hf_compile.uncompile_mm_encoder(model)
            eager = relative(model(**low), want)
            hf_compile.compile_mm_encoder(model)
            assert relative(model(**low), want) <= 1.5 * eager
