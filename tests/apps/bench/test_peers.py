"""The parts of `make bench-peers` that need no other implementation."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def answer(wall_s, cpu_s=1.0, **more):
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_mib": 100.0, **more}


def test_every_round_measures_every_contender_in_another_order():
    in_turn = importlib.import_module("benchmarks.peers.measuring").in_turn
    names = ["a", "b", "c"]

    orders = [in_turn(names, number) for number in range(-1, 3)]

    assert all(sorted(order) == names for order in orders)
    assert len({order[0] for order in orders[1:]}) == 3


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    measuring = importlib.import_module("benchmarks.peers.measuring")
    ours, theirs = [1.0, 10.0, 1.0], [2.0, 20.0, 4.0]  # other load in the second round

    ratio = measuring.median_ratio([*map(answer, theirs)], [*map(answer, ours)], "wall_s")

    assert ratio == 2.0


def test_a_row_has_the_word_errors_of_all_files_together():
    cases = importlib.import_module("benchmarks.peers.cases")
    row_of = importlib.import_module("benchmarks.peers.measuring").row_of
    case = cases.Case("2 files", "files", Path("x.npz"), 4.0, ("one two three", "four"))
    found = [answer(2.0, 3.0, texts=["one two", "four"])] * 2

    row = row_of("peer", found, None, case)

    assert row["wer"] == pytest.approx(1 / 4)
    assert row["cpu_s_per_audio_s"] == pytest.approx(3 / 4)
    assert row["ratio"] is None


def test_no_line_of_the_tables_is_longer_than_100_columns(capsys):
    print_tables = importlib.import_module("benchmarks.peers.table").print_tables
    contenders = importlib.import_module("benchmarks.peers.contenders").CONTENDERS
    part = {"wall_s": 88.888, "cpu_s": 88.888}
    row = {
        "model": "turbo-narrowed",
        "case": "one window, 64 tokens",
        "wall_s": 12345.678,
        "ratio": 123.45,
        "cpu_s_per_audio_s": 123.4567,
        "cpu_ratio": 123.45,
        "peak_mib": 20000.0,
        "tokens": 64,
    }
    start = {"import": part, "load": part, "first": part, "total": part, "cpu_ratio": 123.45}
    failed = {"model": "m", "case": "c", "reason": f"not measured: {'x' * 300}"}

    print_tables(
        {
            "rows": [r | {"contender": one.name} for one in contenders for r in (row, failed)],
            "start_up": [
                r | {"contender": one.name} for one in contenders for r in (start, failed)
            ],
        }
    )

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4 * len(contenders)
    assert max(map(len, lines)) <= 100


def test_every_contender_has_an_engine_and_a_known_format():
    contenders = importlib.import_module("benchmarks.peers.contenders").CONTENDERS
    formats = importlib.import_module("benchmarks.peers.convert").FORMATS

    assert len({one.name for one in contenders}) == len(contenders)
    for one in contenders:
        assert (BENCHMARKS / "peers" / "engines" / f"{one.engine}.py").exists(), one.name
        assert one.format in ("", *formats), one.name
        assert one.is_ours == one.name.startswith("whisperport")


def test_the_programs_for_sherpa_compute_what_openai_whisper_does():
    whisper = pytest.importorskip("whisper.model")
    programs = importlib.import_module("benchmarks.peers.sherpa_programs")
    dims = whisper.ModelDimensions(80, 8, 16, 2, 2, 60, 12, 16, 2, 2)
    torch.manual_seed(0)
    model = whisper.Whisper(dims).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding)
    mel, tokens = torch.randn(1, 80, 16), torch.tensor([[3, 5, 7, 11]])
    with torch.inference_mode():
        expected = model(mel, tokens)

        cross = programs.EncoderWithCrossKV(model)(mel)
        cache = [torch.zeros(2, 1, 12, 16) for _ in range(2)]
        decoder = programs.DecoderWithCache(model)
        first, *cache = decoder(tokens[:, :3], *cache, *cross, torch.tensor([0]))
        last, *_ = decoder(tokens[:, 3:], *cache, *cross, torch.tensor([3]))

    torch.testing.assert_close(torch.cat([first, last], dim=1), expected, rtol=1e-4, atol=1e-5)
