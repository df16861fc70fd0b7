"""A step's kernels, taken apart."""

from tests.gpu.kernel_times import Kernel, alone, joined, taken_apart

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SUM = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_exchanges_beside_kernels_are_told_from_those_alone():
    """Of exchanges the time that nothing else ran; then what nobody used."""
    kernels = [
        Kernel(0.0, 1e6, GATHER),
        Kernel(0.5e6, 2e6, "gemm"),
        Kernel(1e6, 3e6, "gemm"),  # on another stream
        Kernel(2.5e6, 5e6, SUM),
        Kernel(7e6, 8e6, "adam"),
    ]
    told = taken_apart(kernels[::-1])
    assert told["span_s"] == 8
    assert told["compute_s"] == 1.5 + 2 + 1
    assert told["computing_s"] == 2.5 + 1
    assert told["exchanges_s"] == 1 + 2.5
    assert told["exchanges_alone_s"] == 0.5 + 2
    assert told["idle_s"] == 2
    assert told["gather"] == {"number": 1, "seconds": 1, "alone_s": 0.5}
    assert told["sum"] == {"number": 1, "seconds": 2.5, "alone_s": 2}
    assert told["gaps"] == [f" 2000.00 at    5000.0  {SUM[:50]} | adam"]
    assert [line.split()[-1] for line in told["kernels"][:2]] == ["gemm", SUM]


def test_a_time_is_counted_once_however_many_run():
    """Also where one of the others spans several."""
    spans = joined([Kernel(0.0, 4.0, "a"), Kernel(1.0, 2.0, "b"), Kernel(6.0, 8.0, "c")])
    assert spans == [(0.0, 4.0), (6.0, 8.0)]
    assert alone(spans, [(3.0, 7.0)]) == 4
    assert alone([(3.0, 7.0)], spans) == 2
    assert alone(spans, []) == 6
