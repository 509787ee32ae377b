"""What the user reads: rank 0's lines, other ranks' warnings with their rank, reports that line up."""

import logging

import pytest

from runtime.device import Device
from runtime.log import get_logger, setup_logging, warn_once
from runtime.process_group import World
from runtime.report import format_bytes, format_report, format_seconds, start_rows


@pytest.fixture(autouse=True)
def _restore():
    loggers = [logging.getLogger(name) for name in ("runtime", "usp")]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]
    yield
    for log, handlers, level, propagate in before:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


def said(capsys: pytest.CaptureFixture[str], rank: int, world_size: int) -> str:
    """What one rank prints for an INFO, a WARNING and a two-line WARNING."""
    setup_logging(rank, world_size)
    logger = get_logger("usp.attention")
    logger.debug("hidden")
    logger.info("attention: ring x4")
    logger.warning("slow link")
    get_logger("runtime.device").warning("first\nsecond")
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_b37_rank_0_says_all_and_others_only_warn_with_their_rank(capsys):
    """INFO is plain and from rank 0 only; a warning of rank 1 carries its rank on every line."""
    assert said(capsys, 0, 2) == "attention: ring x4\nwarning: slow link\nwarning: first\nsecond\n"
    assert said(capsys, 1, 2) == "[rank 1] warning: slow link\n[rank 1] warning: first\n[rank 1] second\n"


def test_a_lone_rank_has_no_prefix(capsys):
    """World 1 reads like any program."""
    assert said(capsys, 0, 1) == "attention: ring x4\nwarning: slow link\nwarning: first\nsecond\n"


def test_setting_up_twice_does_not_double_lines(capsys):
    """The second set-up replaces the first, also with another level."""
    setup_logging(0, 1)
    setup_logging(0, 1, "WARNING")
    get_logger("usp.x").info("quiet")
    get_logger("usp.x").warning("once")
    assert capsys.readouterr().err == "warning: once\n"


def test_the_root_logger_is_left_alone():
    """An application's own set-up survives ours."""
    before = logging.getLogger().handlers[:], logging.getLogger().level
    setup_logging(0, 1)
    assert (logging.getLogger().handlers[:], logging.getLogger().level) == before


def test_warn_once_counts_per_logger_and_key(capsys):
    """The same key warns once; another key, or another logger, warns again."""
    setup_logging(0, 1)
    one, two = get_logger("usp.once.one"), get_logger("usp.once.two")
    assert [
        warn_once(one, "k", "a"),
        warn_once(one, "k", "a"),
        warn_once(one, "j", "b"),
        warn_once(two, "k", "c"),
    ] == [
        True,
        False,
        True,
        True,
    ]
    assert capsys.readouterr().err == "warning: a\nwarning: b\nwarning: c\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (139 * 2**30, "139 GiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(count, text):
    """No count rounds to 1024 of a unit."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"),
        (0.85, "850 ms"),
        (0.9999, "1.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (3725, "1 h 02 min"),
    ],
)
def test_seconds_read_as_people_say_them(seconds, text):
    """No duration shows 60 seconds or 60 minutes."""
    assert format_seconds(seconds) == text


def test_a_report_lines_up():
    """Values start in one column; further lines of a value do too."""
    assert format_report("start", [("device", "cpu"), ("torch", "2.13\nPython 3.11"), ("x", "")]) == (
        "start\n  device  cpu\n  torch   2.13\n          Python 3.11\n  x"
    )
    assert format_report("empty", []) == "empty"


def test_start_rows_tell_device_ranks_backend_timeout_and_notes():
    """Requirement 37, the runtime's part: alone, and as rank 0 of 3."""
    alone = dict(start_rows(World(0, 1, 0, Device("cpu"))))
    assert alone["ranks"] == "1, no process group"
    assert alone["backend"] == "none needed"
    assert "timeout" not in alone
    group = object()
    three = World(0, 3, 0, Device("cpu"), group=group, backend="gloo", timeout_s=90, notes=("a", "b"))  # type: ignore[arg-type]
    rows = start_rows(three)
    assert [name for name, _ in rows] == ["device", "ranks", "backend", "timeout", "note", "note", "torch"]
    assert dict(rows)["timeout"] == "1 min 30 s per collective"
    assert dict(rows)["ranks"] == "3, this is rank 0"
