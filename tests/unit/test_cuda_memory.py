"""What was seen on a device, as a row: which figure counts, and why others are not known."""

from dataclasses import replace

from enginesmith.pipeline.measure.cuda_memory import CudaPhases
from enginesmith.pipeline.measure.memory import _cuda_row

SEEN = CudaPhases(
    allocated=True,
    weights=100,
    load_peak=130,
    run_peak=180,
    device_used=512,
    reported=170,
    host_peak=9000,
)


def test_peak_is_the_allocator_s_where_it_counts_the_engine() -> None:
    row = _cuda_row(SEEN, "cuda:0", 8)
    assert (row.peak_bytes, row.weights_bytes, row.activation_bytes) == (180, 100, 80)
    assert {name: lens.bytes for name, lens in row.lenses.items()} == {"device": 512, "engine": 170, "allocator": 180}


def test_peak_while_loading_counts_too() -> None:
    assert _cuda_row(replace(SEEN, load_peak=300), "cuda:0", 8).peak_bytes == 300


def test_peak_is_the_device_s_where_the_engine_allocates_by_itself() -> None:
    row = _cuda_row(replace(SEEN, allocated=False, reported=None), "cuda:0", 8)
    assert row.peak_bytes == 512
    assert row.weights_bytes is None
    assert "allocates by itself" in row.reasons["weights_bytes"]
    assert set(row.lenses) == {"device"}
