from tools.cpu.int8 import time_products


def test_every_form_is_timed():
    times = time_products(2, 32, 64)
    assert list(times) == ["float32", "bfloat16", "int8", "int8, converted"]
    assert all(0 < least <= typical for least, typical in times.values())
