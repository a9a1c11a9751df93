import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxvllm.engine.stats import compile_count, enable_compilation_cache


def test_compilations_are_counted_and_repeats_are_not():
    @jax.jit
    def double(x):
        return 2 * x

    x = jnp.ones(3)
    before = compile_count()
    double(x)
    assert (compile_count() - before).num_requests == 1
    assert (compile_count() - before).compile_s > 0
    double(x)
    assert (compile_count() - before).num_requests == 1


@pytest.fixture
def fresh_cache_settings():
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("fresh_cache_settings")
def test_program_found_on_disk_counts_as_a_hit(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    enable_compilation_cache()
    compilation_cache.reset_cache()
    x = jax.ShapeDtypeStruct((5,), jnp.float32)

    def program(x):
        return 3 * x + 17

    jax.jit(program).lower(x).compile()
    assert any(tmp_path.iterdir()), "a quick program is kept too"

    jax.clear_caches()
    before = compile_count()
    jax.jit(program).lower(x).compile()
    count = compile_count() - before
    assert (count.num_requests, count.num_cache_hits, count.num_compiled) == (1, 1, 0)


@pytest.mark.usefixtures("fresh_cache_settings")
def test_cache_lives_in_the_user_s_cache_folder_unless_one_was_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxvllm" / "xla")
    jax.config.update("jax_compilation_cache_dir", "chosen")
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == "chosen"
