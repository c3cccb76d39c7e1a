"""Sizes and rates with their units: what is clear is taken, what is not is explained."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ostraka.cli._arguments import parse_duration, parse_mesh
from ostraka.common.units import bytes_per_second, human_bytes, parse_rate, parse_size, size_bytes


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "5GiB", 5 << 30),
        (parse_size, "5 giB", 5 << 30),
        (parse_size, "500MB", 500_000_000),
        (parse_size, "500mB", 500_000_000),
        (parse_size, "1.5 kB", 1500),
        (parse_size, "2e9", 2_000_000_000),
        (parse_size, "7", 7),
        (parse_size, "7B", 7),
        (parse_size, "7 bytes", 7),
        (parse_size, "3PiB", 3 << 50),
        (parse_rate, "2GB/s", 2e9),
        (parse_rate, "2GB", 2e9),
        (parse_rate, "2GBps", 2e9),
        (parse_rate, "1MiB/s", 1 << 20),
        (parse_rate, "25Gbit/s", 25e9 / 8),
        (parse_rate, "25 Gbit", 25e9 / 8),
        (parse_rate, "25Gbps", 25e9 / 8),
        (parse_rate, "400Mbits/s", 50e6),
        (parse_duration, "4h", 14_400),
        (parse_duration, "1.5d", 129_600),
        (parse_duration, "90s", 90),
        (parse_duration, "30 min", 1800),
        (parse_duration, "30m", 1800),
        (parse_mesh, "data=64, model=8", {"data": 64, "model": 8}),
    ],
)
def test_texts(parse: Callable[[str], Any], text: str, value: Any):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_size, "5Gb", "'5Gb' may mean bits or bytes; write 5GB for bytes"),
        (parse_size, "5gib", "'5gib' may mean bits or bytes; write 5GiB for bytes"),
        (parse_size, "5G", "'5G' may mean 10^9 or 2^30 bytes each; write 5GB for the former, 5GiB"),
        (parse_size, "5k", "'5k' may mean 10^3 or 2^10 bytes each; write 5KB"),
        (parse_size, "5Gbit", "'5Gbit' is in bits; a size is in bytes"),
        (parse_size, "5GB/s", "'5GB/s' is a rate; a size is written as 5GiB"),
        (parse_size, "big", "'big' is no size; write it as 5GiB"),
        (parse_size, "", "'' is no size"),
        (parse_size, "-5GB", "'-5GB' is no size"),
        (parse_size, "0", "'0' is no size: it must be at least a byte"),
        (parse_size, "1e999", "'1e999' is no size: it must be"),
        (parse_rate, "5Gb", "'5Gb' may mean bits or bytes; write 5GB for bytes, 5Gbit/s for bits"),
        (parse_rate, "5Gb/s", "'5Gb' may mean bits or bytes; write 5GB for bytes, 5Gbit/s for"),
        (parse_rate, "5G/s", "'5G' may mean 10^9 or 2^30 bytes"),
        (parse_rate, "fast", "'fast' is no bandwidth; write it as 2GB/s"),
        (parse_rate, "0GB/s", "'0GB/s' is no bandwidth: it must be at least a byte"),
        (parse_duration, "6", "'6' has no unit; write 6h for hours, or 6s, 6m"),
        (parse_duration, "soon", "'soon' is no duration"),
    ],
)
def test_texts_that_are_none(parse: Callable[[str], Any], text: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(text)


def test_sizes_as_arguments():
    for given in ("1GiB", 1 << 30, np.int64(1 << 30), float(1 << 30)):
        assert size_bytes("max_file_bytes", given) == 1 << 30
    with pytest.raises(ValueError, match="max_file_bytes: '1G' may mean"):
        size_bytes("max_file_bytes", "1G")
    odd: list[Any] = [1.5, None, True, float("nan"), [1]]
    for given in odd:
        with pytest.raises(TypeError, match="max_file_bytes is .*; it must be a whole number of"):
            size_bytes("max_file_bytes", given)


def test_rates_as_arguments():
    assert bytes_per_second("read_bandwidth", None) is None
    assert [bytes_per_second("x", rate) for rate in ("2GB/s", 2_000_000_000)] == [2e9, 2e9]
    with pytest.raises(ValueError, match="read_bandwidth: '2Gb' may mean bits or bytes"):
        bytes_per_second("read_bandwidth", "2Gb")
    odd: list[Any] = [0, -1, float("inf"), float("nan"), True, [2]]
    for given in odd:
        with pytest.raises(TypeError, match="read_bandwidth is .*; it must be a number of bytes a"):
            bytes_per_second("read_bandwidth", given)


def test_sizes_for_people():
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 30: "5.0 GiB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
