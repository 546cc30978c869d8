"""Failures, modes, ranges, threads: what a call does when it is not the plain case."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import hf_compile
from hf_compile import CompilationConfig

from .test_graphs import Counting
from .tiny import EAGER, clip, images, patches, qwen, regions, siglip, snapshot


class Layer(nn.Module):
    """A layer that cannot be one graph when `mask` is given: it asks for a value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.dropout(self.linear(hidden))
        if mask is not None and mask.sum().item() > 0:
            hidden = hidden * 2
        return hidden


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.project = nn.Sequential(nn.Linear(8, 4))

    def forward(self, pixel_values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            pixel_values = layer(pixel_values, mask)
        return self.project(pixel_values)


@pytest.fixture
def tower():
    torch.manual_seed(0)
    return Tower().eval()


MASK = torch.ones(2)
RED = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def compiled(model, **options):
    return hf_compile.compile_mm_encoder(model, compilation_config={**EAGER, **options})


# --- failures


@pytest.mark.smoke
def test_a_failed_compile_runs_eager_for_its_kind_of_call_only(tower, caplog):
    with torch.no_grad():
        plain, masked = tower(RED), tower(RED, MASK)
        compiled(tower)
        assert torch.equal(tower(RED), plain)
        with hf_compile.compilation_counter.expect(num_compile_failures=1, num_graphs_seen=0, num_eager_calls=6):
            assert torch.equal(tower(RED, MASK), masked)
            assert torch.equal(tower(RED, MASK), masked)  # not tried again
        with hf_compile.compilation_counter.expect(num_eager_calls=0, num_graphs_seen=0):
            assert torch.equal(tower(RED), plain)  # the good graph stays
    region = regions(tower)["Layer"]
    assert (region.state, region.graphs, region.calls, region.eager_calls) == ("compiled", 1, 6, 6)
    assert "test_calls.py:" in region.reason
    assert "data-dependent" in region.reason


def test_the_warning_comes_once(tower, monkeypatch):
    import hf_compile.compiler.region as region_room

    said = []
    monkeypatch.setattr(region_room.logger, "warning", said.append)
    compiled(tower)
    with torch.no_grad():
        for _ in range(3):
            tower(RED, MASK)
    assert len(said) == 1
    assert "Layer runs eager for this kind of call: " in said[0]


def test_strict_raises_with_region_cause_and_remedy(tower):
    compiled(tower, strict=True)
    with torch.no_grad():
        with pytest.raises(
            hf_compile.RegionCompileError, match=r"Layer could not be compiled: .*test_calls\.py:\d+ in"
        ):
            tower(RED, MASK)
        tower(RED)
    assert regions(tower)["Layer"].graphs == 1


def test_an_error_of_eager_is_raised_as_it_is_and_changes_nothing(tower):
    compiled(tower)
    before = snapshot_of(tower)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as first:
            tower(torch.randn(2, 5, 7))
        assert not isinstance(first.value, hf_compile.HfCompileError)
        with hf_compile.compilation_counter.expect(num_eager_calls=0):
            tower(RED)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            tower(torch.randn(2, 5, 7))
    assert snapshot_of(tower) == before
    assert regions(tower)["Layer"].state == "compiled"


def snapshot_of(model):
    return [{k: v for k, v in vars(module).items() if not isinstance(v, dict)} for module in model.modules()]


def test_a_backend_that_fails_runs_eager():
    def broken(graph_module, example_inputs):
        raise RuntimeError("this accelerator is on fire")

    model = clip()
    with torch.no_grad():
        want = model(**images(2)).last_hidden_state
        compiled(model, backend=broken)
        assert torch.equal(model(**images(2)).last_hidden_state, want)
    region = regions(model)["CLIPEncoderLayer"]
    assert region.state == "eager"
    assert "this accelerator is on fire" in region.reason


def test_a_graph_that_fails_at_run_time_gives_up_its_region():
    def late(graph_module, example_inputs):
        def call(*args):
            raise RuntimeError("bad kernel")

        return call

    model = clip()
    with torch.no_grad():
        want = model(**images(2)).last_hidden_state
        compiled(model, backend=late)
        for _ in range(2):
            assert torch.equal(model(**images(2)).last_hidden_state, want)
    region = regions(model)["CLIPEncoderLayer"]
    assert (region.state, region.graphs) == ("eager", 1)
    assert "bad kernel" in region.reason


def test_verify_finds_wrong_numbers():
    def wrong(graph_module, example_inputs):
        def call(*args):
            return tuple(value * 1.5 if isinstance(value, torch.Tensor) else value for value in graph_module(*args))

        return call

    model = clip()
    with torch.no_grad():
        want = model(**images(2)).last_hidden_state
        compiled(model, backend=wrong, verify=True)
        assert torch.equal(model(**images(2)).last_hidden_state, want)
        assert torch.equal(model(**images(1)).last_hidden_state, model(**images(1)).last_hidden_state)
        assert "the graph differs from eager" in regions(model)["CLIPEncoderLayer"].reason
        compiled(model, backend=wrong, verify=True, strict=True)
        with pytest.raises(hf_compile.VerificationError, match="CLIPVisionEmbeddings"):
            model(**images(2))
        compiled(model)
        assert hf_compile.verify(model, images(3)) == {"": 0.0}
        compiled(model, backend=wrong)
        assert hf_compile.verify(model, images(3))[""] > 0.01
        assert regions(model)


def test_recompile_limits(tower):
    compiled(tower)
    with torch.no_grad():
        tower(RED)
        tower.double()
        tower(RED.double())
        tower.float()
    reason = regions(tower)["Layer"].reason
    assert reason == (
        "graph 1 was made for no_grad float32 hidden 2x5x8; graph 2 was made for no_grad float64 hidden 2x5x8"
    )
    for options, wanted in (
        ({"recompile_limit": 1}, "recompile_limit=1 is reached"),
        ({"mode": "ONE_GRAPH"}, "would need a second graph"),
    ):
        compiled(tower, **options)
        with torch.no_grad():
            tower(RED)
            tower.double()
            tower(RED.double())
            tower.float()
        region = regions(tower)["Layer"]
        assert (region.graphs, region.eager_calls) == (1, 3)
        assert wanted in region.reason
    compiled(tower, fail_on_recompile=True)
    with torch.no_grad():
        tower(RED)
        tower(torch.randn(7, 3, 8))
        tower.double()
        with pytest.raises(hf_compile.RegionCompileError, match="needs a further graph, and fail_on_recompile is set"):
            tower(RED.double())


def test_torchs_own_ways_to_raise_are_honoured(tower):
    compiled(tower)
    with torch.no_grad():
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
            tower(RED)
        tower(RED)
        tower.double()
        with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(torch._dynamo.exc.RecompileError):
            tower(RED.double())
        assert regions(tower)["Layer"].eager_calls == 0


# --- modes


def test_each_mode_has_a_stated_policy(tower):
    compiled(tower)
    with torch.no_grad():
        tower(RED)
    with torch.inference_mode():
        tower(RED)
    tower(RED)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        tower(RED)
    # inference, grad and autocast: the first layer's input is another kind of tensor than what layers hand on
    assert regions(tower)["Layer"].graphs == 1 + 2 + 2 + 2
    tower.train()
    tower(RED)
    region = regions(tower)["Layer"]
    assert region.eager_calls == 3
    assert "execution_modes['train'] is 'eager'" in region.reason
    tower.eval()
    compiled(tower, execution_modes={"train": "compile", "autocast": "eager"})
    tower.train()
    tower(RED)
    tower.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        tower(RED)
    region = regions(tower)["Layer"]
    assert (region.graphs, region.eager_calls) == (2, 3)
    assert "autocast" in region.reason


def test_gradients_equal_eagers():
    for make, inputs in ((clip, images(2)), (qwen, patches([[1, 8, 8], [1, 4, 8]]))):
        model, reference = make(), make()
        hf_compile.compile_mm_encoder(model, compilation_config={"backend": "aot_eager"})
        model(**inputs).last_hidden_state.square().sum().backward()
        reference(**inputs).last_hidden_state.square().sum().backward()
        for left, right in zip(model.parameters(), reference.parameters(), strict=True):
            if right.grad is not None:
                torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-4)
        assert all(region.graphs == 1 for region in regions(model).values() if region.state == "compiled")
        assert any(region.state == "compiled" for region in regions(model).values())


def test_an_outer_compile_inlines_the_plain_model():
    model, backend = clip(), Counting()
    compiled(model)
    with torch.no_grad():
        want = model(**images(2)).last_hidden_state
        calls = regions(model)["CLIPEncoderLayer"].calls
        outer = torch.compile(lambda pixels: model.encoder.layers[0](pixels, None), backend=backend, fullgraph=True)
        outer(torch.randn(2, 17, 32))
        assert torch.equal(model(**images(2)).last_hidden_state, want)
    assert backend.graphs == 1
    assert regions(model)["CLIPEncoderLayer"].calls == calls + 3


def test_a_dispatch_mode_sees_every_operation():
    from torch.utils.flop_counter import FlopCounterMode

    model = clip()
    with torch.no_grad():
        with FlopCounterMode(display=False) as want:
            model(**images(2))
        compiled(model)
        with FlopCounterMode(display=False) as got:
            model(**images(2))
        assert got.get_total_flops() == want.get_total_flops() > 0
        assert "a torch dispatch mode is active" in regions(model)["CLIPEncoderLayer"].reason
        model(**images(2))
    assert (regions(model)["CLIPEncoderLayer"].graphs, regions(model)["CLIPEncoderLayer"].calls) == (1, 3)


def test_a_switched_off_dynamo_is_not_called_compiled():
    model = clip()
    compiled(model)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(**images(2))
    assert "torch's stance is force_eager" in regions(model)["CLIPEncoderLayer"].reason
    with torch.no_grad(), torch._dynamo.config.patch(disable=True):
        model(**images(2))
    region = regions(model)["CLIPEncoderLayer"]
    assert (region.state, region.graphs, region.eager_calls) == ("eager", 0, 6)
    assert "Dynamo is switched off" in region.reason


# --- inputs


def test_inputs_that_are_not_contiguous_are_no_further_graph():
    model = clip()
    compiled(model)
    with torch.no_grad():
        for batch in (1, 3):
            pixels = images(batch)["pixel_values"]
            want = model(pixels).last_hidden_state
            flipped = pixels.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            assert not flipped.is_contiguous()
            torch.testing.assert_close(model(flipped).last_hidden_state, want)
            wide = torch.empty(batch, 3, 32, 64)[..., ::2].copy_(pixels)
            torch.testing.assert_close(model(wide).last_hidden_state, want)
    assert [region.graphs for region in regions(model).values()] == [1, 1]


def test_views_are_no_further_graph(tower):
    """A view's base varies in size; it must be no guard, also in a process that traced such a layer before."""
    for _ in range(2):
        torch.manual_seed(0)
        model = compiled(Tower().eval())
        with torch.no_grad():
            for length in (5, 9, 3):
                model(torch.randn(length + 4, 2, 8)[2:-2].reshape(length, 2, 8))
                model(torch.randn(length, 2, 8))
        assert regions(model)["Layer"].graphs == 1


def test_an_empty_batch(tower):
    hf_compile.compile_mm_encoder(tower)
    with torch.no_grad():
        tower(RED)
        assert tower(RED[:0]).shape == (0, 5, 4)


def test_ranges_and_sizes():
    model = clip()
    compiled(model, compile_ranges=[(1, 2), (3, 4)])
    with torch.no_grad():
        for batch in (1, 3, 2, 4):
            model(**images(batch))
        assert regions(model)["CLIPEncoderLayer"].graphs == 2
        with pytest.raises(
            hf_compile.CompileRangeError,
            match=r"dim 0 of pixel_values is 5, outside the compile ranges 1\.\.2, 3\.\.4",
        ):
            model(**images(5))
        model(**images(4))
        compiled(model, compile_ranges=[(1, 2)], out_of_range="eager")
        model(**images(1))
        model(**images(5))
        region = regions(model)["CLIPEncoderLayer"]
        assert (region.graphs, region.eager_calls) == (1, 3)
        compiled(model, compile_sizes={"hidden_states.0": [4]})
        for batch in (4, 1, 3, 4):
            model(**images(batch))
        assert regions(model)["CLIPEncoderLayer"].graphs == 2
        assert regions(model)["CLIPVisionEmbeddings"].graphs == 1


@pytest.mark.parametrize("kind", ["backed", "unbacked", "backed_size_oblivious"])
def test_dynamic_shapes_types(tower, kind):
    compiled(tower, dynamic_shapes=kind)
    with torch.no_grad():
        for batch in (1, 3, 2, 1):
            tower(torch.randn(batch, 5, 8))
    assert regions(tower)["Layer"].graphs == (2 if kind == "backed" else 1)


def test_declared_dims(tower):
    compiled(tower, dynamic_arg_dims={"hidden": [0]})
    with torch.no_grad():
        tower(RED)
        tower(torch.randn(4, 5, 8))
        assert regions(tower)["Layer"].graphs == 1
        assert regions(tower)["Layer"].dynamic_arg_dims == {"hidden": [0]}
        compiled(tower, dynamic_arg_dims={"Layer.hidden": {0: "batch", -2: "length"}})
        tower(RED)
        tower(torch.randn(4, 6, 8))
        assert regions(tower)["Layer"].graphs == 1
        compiled(tower, dynamic_arg_dims={"hidden": 2}, strict=True)
        with pytest.raises(hf_compile.RegionCompileError, match="take it out of dynamic_arg_dims"):
            tower(RED)


def test_a_dim_out_of_range_at_the_first_call_restores_the_model(tower):
    before = snapshot_of(tower)
    compiled(tower, dynamic_arg_dims={"hidden": 5})
    with (
        torch.no_grad(),
        pytest.raises(hf_compile.ConfigurationError, match="dim 5 is out of range; the tensor has 3 dims"),
    ):
        tower(RED)
    assert snapshot_of(tower) == before
    assert hf_compile.status(tower).encoders == ()


def test_marked_classes_are_honoured():
    class Sized(Layer):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(hidden, mask)

    hf_compile.support_torch_compile(dynamic_arg_dims={"hidden": 0}, mark_unbacked_dims={"hidden": 0})(Sized)
    torch.manual_seed(0)
    model = Tower().eval()
    model.layers = nn.ModuleList(Sized() for _ in range(2)).eval()
    compiled(model)
    with torch.no_grad():
        for batch in (1, 4, 2):
            model(torch.randn(batch, 5, 8))
    assert regions(model)["Sized"].graphs == 1
    assert regions(model)["Sized"].inputs[0].dims == (0,)


# --- threads


def test_threads_compile_once_and_get_right_results():
    model = siglip()
    with torch.no_grad():
        want = {batch: model(**images(batch)).last_hidden_state for batch in range(1, 7)}
    compiled(model)
    errors, start = [], threading.Barrier(6)

    def work(batch):
        try:
            start.wait()
            with torch.no_grad():
                for _ in range(3):
                    torch.testing.assert_close(model(**images(batch)).last_hidden_state, want[batch])
        except BaseException as error:  # noqa: BLE001  told by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    assert [region.graphs for region in regions(model).values()] == [1, 1, 1]
    assert [region.eager_calls for region in regions(model).values()] == [0, 0, 0]


def test_a_long_compile_shows_a_bar_and_short_ones_do_not(capsys, monkeypatch):
    from transformers.utils import logging

    import hf_compile.compiler.progress as progress

    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0.0)
    with progress.progress_bar("compiling Block"):
        threading.Event().wait(0.1)
    assert capsys.readouterr().err == ""  # nobody watches a log file
    monkeypatch.setattr(progress, "_is_watched", lambda: True)
    logging.enable_progress_bar()
    with progress.progress_bar("compiling Block"):
        threading.Event().wait(0.2)
    assert "compiling Block" in capsys.readouterr().err
    logging.disable_progress_bar()
    with progress.progress_bar("compiling Block"):
        threading.Event().wait(0.1)
    assert capsys.readouterr().err == ""


def test_config_is_checked_before_anything_is_changed():
    model = clip()
    before = snapshot(model)
    for options in ({"backend": "no such backend"}, {"compile_sizes": {"nothing.0": [1]}}, {"encoders": {"x": {}}}):
        with pytest.raises(hf_compile.ConfigurationError):
            hf_compile.compile_mm_encoder(model, compilation_config=CompilationConfig(**options))
        assert snapshot(model) == before
