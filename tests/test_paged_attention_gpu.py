"""The GPU kernels, interpreted on the CPU with race detection: conformance, planted faults, what is refused."""

import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import cases, check, check_write, make_case
from gpu_cases import FORMS, attend, attend_without_cache
from hypothesis import HealthCheck, given, settings

from jaxvllm.kernels import kv_cache
from jaxvllm.kernels.gpu import backend as paged_attention_gpu
from jaxvllm.kernels.gpu import common as gpu_common
from jaxvllm.kernels.gpu import decode as gpu_decode
from jaxvllm.kernels.gpu import decode_plan as gpu_decode_plan
from jaxvllm.kernels.gpu import prefill_tile as gpu_prefill_tile
from jaxvllm.kernels.gpu.backend import BLOCK_SIZES, DTYPES, HEAD_DIMS, MAX_GROUP
from jaxvllm.kernels.paged_attention import AttentionForm, resolve_backend
from tools.gpu.compile import SHAPES

# the interpreter multiplies poison that the kernel masks afterwards
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

RANDOM_CASES = {"ragged": 15, "decode": 14}  # per form: 7 * 29 = 203


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("phase", RANDOM_CASES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_random_batches_agree_with_the_oracle(form, phase):
    # derandomized: the same batches every time
    @settings(
        max_examples=RANDOM_CASES[phase],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]  # the enum lists its members
    )
    @given(case=cases(form, backend="gpu", decode_only=phase == "decode"))
    def run(case):
        ran.append(case)
        check("gpu", case, attend)

    ran = []
    run()
    assert len(ran) == RANDOM_CASES[phase]


def test_the_random_cases_are_two_hundred_in_all():
    assert len(FORMS) * sum(RANDOM_CASES.values()) >= 200


def test_the_forms_hold_all_that_the_kernels_take():
    """Whatever a model may ask of the kernels stands in a form here, and in a shape that is compiled."""
    for forms in (FORMS.values(), SHAPES.values()):
        assert {kv_cache.padded_head_dim(form.head_dim, "gpu") for form in forms} == set(HEAD_DIMS)
        assert {form.block_size for form in forms} == set(BLOCK_SIZES)
        assert {form.dtype for form in forms} == set(DTYPES)
        assert {1, 2, MAX_GROUP} <= {form.num_heads // form.num_kv_heads for form in forms}
        for option in ("sliding_window", "logits_soft_cap"):
            assert {getattr(form, option) is None for form in forms} == {True, False}


def test_decode_of_one_long_context_beside_short_ones_and_padding():
    check("gpu", make_case(FORMS["bfloat16"], [1, 160, 16, 65], [1] * 4, backend="gpu", decode_only=True), attend)


def test_a_mixed_batch_of_prompts_chunks_decodes_and_empty_rows():
    check("gpu", make_case(FORMS["bfloat16"], [64, 150, 0, 17, 129], [5, 1, 0, 17, 50], backend="gpu"), attend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "float16_windowed"])
def test_a_cache_full_of_nan_is_as_good_as_one_of_zeros(name):
    form = FORMS[name]
    case = make_case(form, [33, 65, 100], [33, 1, 30], backend="gpu")
    clean = check("gpu", case.with_pool(jnp.nan_to_num(case.pool)), attend)
    np.testing.assert_array_equal(np.asarray(check("gpu", case, attend)), np.asarray(clean))


@pytest.mark.slow
@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "prefill"])
def test_a_block_id_out_of_range_harms_its_own_sequence_only(decode_only):
    """The interpreter raises where a copy leaves the pool."""
    form = replace(FORMS["bfloat16"], max_seqs=2, max_blocks=3)
    case = make_case(form, [40, 30], [1, 1] if decode_only else [7, 30], backend="gpu", decode_only=decode_only)
    case = case.with_pool(jnp.nan_to_num(case.pool))  # which block stands in is not said
    want = np.asarray(check("gpu", case, attend), np.float32)
    for wrong in (form.num_blocks, 2**31 - 1, -1, -(2**31)):
        tables = case.batch.block_tables.at[1, 0].set(wrong)
        got = np.asarray(attend(case.q, case.pool, tables, *case.batch[2:], **form.options, decode_only=decode_only))
        mine = slice(0, int(case.batch.cu_seqlens_q[1]))
        np.testing.assert_array_equal(got.astype(np.float32)[mine], want[mine])


def test_new_tokens_are_written_to_their_slots_and_nowhere_else():
    check_write("gpu", make_case(FORMS["bfloat16"], [64, 150, 0, 17], [5, 1, 0, 17], backend="gpu"))


@pytest.mark.parametrize("lens", [[64, 65, 1, 700], [1] * 40], ids=lambda x: f"{len(x)}_sequences")
@pytest.mark.parametrize("num_workers", [1, 7])
def test_the_line_is_cut_into_equal_pieces_without_gaps(lens, num_workers):
    context_lens = jnp.array([*lens, 0, 9], jnp.int32)
    decodes = jnp.array([True] * len(lens) + [False, False])
    plan = gpu_decode_plan.make_plan(decodes, context_lens, tile=64, num_workers=num_workers, sliding_window=None)
    tiles = [-(-n // 64) for n in lens]
    starts, bounds = np.asarray(plan.starts), np.asarray(plan.bounds)
    np.testing.assert_array_equal(starts, np.cumsum([0, *tiles, 0, 0]))
    assert bounds[0] == 0
    assert bounds[-1] == sum(tiles)
    assert np.diff(bounds).max() == -(-sum(tiles) // num_workers)
    for w, (first, last) in enumerate(zip(plan.first, plan.last, strict=True)):
        walked = [t for i in range(first, last) for t in range(*np.clip(starts[i : i + 2], *bounds[w : w + 2]))]
        assert walked == list(range(bounds[w], bounds[w + 1]))


# Faults planted in the kernels must show. Those that make the interpreter raise leave its state behind: cleared here.


@pytest.fixture
def fresh_interpreter():
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # the public module does not have it

    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def _keep_scores(s, *_):
    return s


def _nothing(*_, **__):
    pass


FAULTS = {
    "decode reads past the context": (gpu_decode, "_mask_tile", _keep_scores, True),
    "prefill looks ahead": (gpu_prefill_tile, "mask_scores", _keep_scores, False),
    "prefill multiplies poisoned values": (gpu_prefill_tile, "clear_values", _nothing, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_shows(monkeypatch, fault):
    module, name, broken, decode_only = fault
    news = [1, 1] if decode_only else [30, 40]
    case = make_case(FORMS["wide_heads"], [30, 70], news, backend="gpu", decode_only=decode_only)
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError, match=r"off by|no token may see"):
        check("gpu", case, attend_without_cache)


class _WithoutWaits:
    """Pallas's GPU module, but waiting for a copy does nothing."""

    def __getattr__(self, name):
        return _nothing if name == "barrier_wait" else getattr(gpu_common.plgpu, name)


@pytest.mark.slow
def test_a_forgotten_wait_shows(monkeypatch, fresh_interpreter):
    case = make_case(FORMS["wide_heads"], [30, 190], [1, 1], backend="gpu", decode_only=True)
    monkeypatch.setattr(gpu_decode, "plgpu", _WithoutWaits())
    with pytest.raises(Exception, match=r"off by|no token may see|[Rr]ace"):
        check("gpu", case, attend_without_cache)


# What the kernels cannot take is decided before anything runs.

QWEN = AttentionForm(16, 8, 128, 256, "bfloat16", "9.0")
REFUSED = {
    "compute capability 8.0": QWEN._replace(compute_capability="8.0"),
    "compute capability 10.0": QWEN._replace(compute_capability="10.0"),
    "float32": QWEN._replace(dtype="float32"),
    "head_dim=512": QWEN._replace(head_dim=512),
    "more than 16": QWEN._replace(num_kv_heads=1, num_heads=32),
    "kvcache_block_size=48": QWEN._replace(block_size=48),
}


def test_a_hopper_gpu_gets_the_kernels():
    assert resolve_backend("auto", "gpu", QWEN) == resolve_backend("gpu", "cuda", QWEN) == "gpu"


@pytest.mark.parametrize(("reason", "form"), REFUSED.items(), ids=REFUSED.keys())
def test_what_the_kernels_cannot_take_falls_back_with_one_line(caplog, reason, form):
    with caplog.at_level(logging.WARNING):
        assert resolve_backend("auto", "gpu", form) == "xla"
    (line,) = caplog.messages
    assert reason in line


@pytest.mark.parametrize(("reason", "form"), REFUSED.items(), ids=REFUSED.keys())
def test_what_the_kernels_cannot_take_is_an_error_when_asked_for_by_name(reason, form):
    with pytest.raises(ValueError, match=reason):
        resolve_backend("gpu", "gpu", form)


def test_the_kernels_refuse_a_pool_they_cannot_take():
    case = make_case(FORMS["bfloat16"], [3], [3], backend="gpu")
    with pytest.raises(ValueError, match="float32"):
        paged_attention_gpu.attend(case.q, case.pool.astype(jnp.float32), *case.batch[1:], scale=1.0)
