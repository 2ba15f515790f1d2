"""Read the compiler's estimate: the columns of a real summary, and damaged ones."""

import random

import pytest

from whisperport.targets.ethos_u.estimate import read_estimate, summary

# Written by Vela 5.1.0 for the encoder of the embedded model in w8a16, without the columns of accesses.
NAMES = (
    "experiment,network,accelerator_configuration,system_config,memory_mode,core_clock,inference_time,"
    "sram_memory_used,dram_memory_used,on_chip_flash_memory_used,off_chip_flash_memory_used,nn_macs,"
    "cycles_total"
)
VALUES = (
    "default,out,Ethos_U85_256,Ethos_U85_SYS_DRAM_Mid,Sram_Only,1000000000.0,0.129062986,18469.75,0.0,"
    "1501.84375,0.0,3699024000,129062986"
)


def read(tmp_path, text):
    path = tmp_path / "estimate.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_estimate(path)


def test_an_estimate_is_in_seconds_and_bytes_and_says_for_which_memory(tmp_path):
    assert read(tmp_path, f"{NAMES}\n{VALUES}\n") == {
        "estimated_s": 0.129062986,
        "cycles": 129062986,
        "clock_hz": 1e9,
        "sram_bytes": 18469.75 * 1024,
        "dram_bytes": 0,
        "on_chip_flash_bytes": 1501.84375 * 1024,
        "off_chip_flash_bytes": 0,
        "macs": 3699024000,
        "system_config": "Ethos_U85_SYS_DRAM_Mid",
        "memory_mode": "Sram_Only",
    }


def test_users_read_an_estimate_with_its_memory_and_that_nothing_was_measured(tmp_path):
    text = summary(read(tmp_path, f"{NAMES}\n{VALUES}\n"))

    assert text == (
        "Vela estimates 129.1 ms at 1000 MHz, and 18.91 MB of SRAM, 1.538 MB of flash, with "
        "Ethos_U85_SYS_DRAM_Mid and Sram_Only; nothing was measured"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        NAMES,
        f"{NAMES}\n{VALUES}\n{VALUES}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'nan')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'inf')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', '-1')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'fast')}\n",
        f"{NAMES.replace('cycles_total', 'cycles')}\n{VALUES}\n",
        f"{NAMES}\ndefault,out\n",
        b"\xff\x00" * 100,
        "x" * 200_000,
        f'{NAMES}\n"{VALUES}',
    ],
)
def test_a_damaged_summary_gives_no_estimate(tmp_path, text):
    assert read(tmp_path, text) == {}


def test_a_missing_summary_gives_no_estimate(tmp_path):
    assert read_estimate(tmp_path / "estimate.csv") == {}
    assert read_estimate(tmp_path) == {}


def test_a_mutated_summary_gives_finite_numbers_or_no_estimate(tmp_path):
    randomly = random.Random(0)
    whole = f"{NAMES}\n{VALUES}\n".encode()
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(randomly.randint(1, 3)):
            content[randomly.randrange(len(content))] = randomly.randrange(256)
        numbers = [
            one for one in read(tmp_path, bytes(content)).values() if not isinstance(one, str)
        ]
        assert all(0 <= number < float("inf") for number in numbers)
