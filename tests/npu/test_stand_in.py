"""How the stand-in is made: once, whole or not at all, and with a reason where it cannot be."""

import sys

import pytest

from tests.npu import stand_in


def test_what_cannot_be_made_says_why():
    """A command that fails, or is not there, gives the reason that the skip shows."""
    with pytest.raises(stand_in.Unavailable, match="pip found no wheel: no such release"):
        stand_in.run([sys.executable, "-c", "raise SystemExit('no such release')"], "pip found no wheel")
    with pytest.raises(stand_in.Unavailable, match=r"does not build: .*no-such-compiler"):
        stand_in.run(["no-such-compiler"], "libhccl.so does not build")


def test_a_folder_is_filled_once_and_never_half(tmp_path):
    """Who fails while filling leaves nothing; the next one fills it; after that it is only used."""
    folder = tmp_path / "made"

    def torn() -> None:
        with stand_in.made_once(folder) as unfinished:
            assert unfinished is not None
            (unfinished / "part").touch()
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        torn()
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]
    for wanted in (True, False):
        with stand_in.made_once(folder) as unfinished:
            assert (unfinished is not None) == wanted
            if unfinished is not None:
                (unfinished / "whole").touch()
    assert (folder / "whole").exists()
