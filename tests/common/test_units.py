"""Sizes and rates with their units: what is clear is taken, what is not is explained."""

import re
from typing import Any

import numpy as np
import pytest

from ostraka.cli._arguments import parse_duration, parse_mesh
from ostraka.common.units import bytes_per_second, human_bytes, parse_rate, parse_size, size_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GiB", 5 << 30),
        ("5 gib".replace("b", "B"), 5 << 30),
        ("500MB", 500_000_000),
        ("500mB", 500_000_000),
        ("1.5 kB", 1500),
        ("2e9", 2_000_000_000),
        ("7", 7),
        ("7B", 7),
        ("7 bytes", 7),
        ("3PiB", 3 << 50),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5Gb", "'5Gb' may mean bits or bytes; write 5GB for bytes"),
        ("5gib", "'5gib' may mean bits or bytes; write 5GiB for bytes"),
        ("5G", "'5G' may mean 10^9 or 2^30 bytes each; write 5GB for the former, 5GiB for the"),
        ("5k", "'5k' may mean 10^3 or 2^10 bytes each; write 5KB"),
        ("5Gbit", "'5Gbit' is in bits; a size is in bytes"),
        ("5GB/s", "'5GB/s' is a rate; a size is written as 5GiB"),
        ("big", "'big' is no size; write it as 5GiB"),
        ("", "'' is no size"),
        ("-5GB", "'-5GB' is no size"),
        ("0", "'0' is no size: it must be at least a byte"),
        ("1e999", "'1e999' is no size: it must be"),
    ],
)
def test_texts_that_are_no_sizes(text: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("2GB/s", 2e9),
        ("2GB", 2e9),
        ("2GBps", 2e9),
        ("1MiB/s", 1 << 20),
        ("25Gbit/s", 25e9 / 8),
        ("25 Gbit", 25e9 / 8),
        ("25Gbps", 25e9 / 8),
        ("400Mbits/s", 50e6),
    ],
)
def test_rates(text: str, rate: float):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5Gb", "'5Gb' may mean bits or bytes; write 5GB for bytes, 5Gbit/s for bits"),
        ("5Gb/s", "'5Gb' may mean bits or bytes; write 5GB for bytes, 5Gbit/s for bits"),
        ("5G/s", "'5G' may mean 10^9 or 2^30 bytes"),
        ("fast", "'fast' is no bandwidth; write it as 2GB/s"),
        ("0GB/s", "'0GB/s' is no bandwidth: it must be at least a byte"),
    ],
)
def test_texts_that_are_no_rates(text: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_rate(text)


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
    assert (
        bytes_per_second("read_bandwidth", "2GB/s") == bytes_per_second("x", 2_000_000_000) == 2e9
    )
    with pytest.raises(ValueError, match="read_bandwidth: '2Gb' may mean bits or bytes"):
        bytes_per_second("read_bandwidth", "2Gb")
    odd: list[Any] = [0, -1, float("inf"), float("nan"), True, [2]]
    for given in odd:
        with pytest.raises(TypeError, match="read_bandwidth is .*; it must be a number of bytes a"):
            bytes_per_second("read_bandwidth", given)


def test_sizes_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
    ]


def test_durations_and_meshes():
    assert (parse_duration("4h"), parse_duration("1.5d"), parse_duration("90s")) == (
        14_400,
        129_600,
        90,
    )
    assert parse_duration("30 min") == parse_duration("30m") == 1800
    with pytest.raises(ValueError, match="'6' has no unit; write 6h for hours, or 6s, 6m"):
        parse_duration("6")
    with pytest.raises(ValueError, match="'soon' is no duration"):
        parse_duration("soon")
    assert parse_mesh("data=64, model=8") == {"data": 64, "model": 8}
