"""Who downloads: local rank 0 of each host, once; the others wait, and hear of a failure."""

import os
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from runtime.device import Device
from runtime.hub import HubError, Patterns, check_hub, local_folder
from runtime.process_group import PeerError, World, connect, ending_together, read_hub
from tests.runtime.processes import fork_ranks

CPU = Device("cpu")
FIRST = Patterns(["model_index.json"])

# Stands for a hub's package: notes each call, and is slow. Only who calls it, and how, is under test.
FAKE = """
import os, time
from pathlib import Path

def snapshot_download(name, *, allow_patterns, ignore_patterns, local_files_only):
    folder = Path(os.environ["FAKE_HUB"])
    with (folder / "calls").open("a") as calls:
        calls.write(f"{os.environ['RANK']} {name} {allow_patterns} {ignore_patterns} {local_files_only}\\n")
    if local_files_only:
        assert (folder / "weights").exists(), "looked before the download was done"
        return str(folder)
    time.sleep(0.3)
    if (folder / "fails").exists():
        raise OSError("no such model\\nsee the long story")
    (folder / "weights" if "*" in allow_patterns else folder / "model_index.json").write_text("{}")
    return str(folder)
"""


def rest(folder: Path) -> Patterns:
    """What is wanted once the small files are here."""
    assert (folder / "model_index.json").exists()
    return Patterns(["*"], ["*.bin"])


def fetch(folder: Path, hosts: int, limit_s: float) -> None:
    """In a rank: get the folder, or say how it failed; `hosts` of them share the ranks."""
    os.environ["FAKE_HUB"] = str(folder)
    sys.path.insert(0, str(folder))
    if hosts > 1:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    # Rank 0 serves the store, so it must not leave before the others.
    with connect(CPU, self_test=False) as world, ending_together(world):
        if world.rank == 0 and limit_s < 1:
            time.sleep(2)
        try:
            print(local_folder("a/b", world, first=FIRST, then=rest, hub="modelscope", limit_s=limit_s))
        except (HubError, PeerError) as error:
            print(f"{type(error).__name__}: {error}")


def run(folder: Path, *, hosts: int = 1, limit_s: float = 30.0) -> tuple[list[str], list[str]]:
    """What each of 3 ranks printed, and the calls that the hub saw."""
    (folder / "modelscope.py").write_text(FAKE)
    ended = fork_ranks(3, partial(fetch, folder, hosts, limit_s), folder)
    assert [rank.code for rank in ended] == [0] * 3, [rank.text for rank in ended]
    return [rank.text.strip() for rank in ended], (folder / "calls").read_text().splitlines()


def test_one_rank_of_a_host_downloads_and_all_get_the_folder(tmp_path):
    """B60: two rounds of one call each on rank 0; the others look it up afterwards, without the network."""
    printed, calls = run(tmp_path)
    assert printed == [str(tmp_path)] * 3
    online = [call for call in calls if call.endswith("False")]
    assert online == ["0 a/b ['model_index.json'] [] False", "0 a/b ['*'] ['*.bin'] False"]
    offline = sorted(call for call in calls if call.endswith("True"))
    patterns = ("['*'] ['*.bin']", "['model_index.json'] []")
    assert offline == [f"{rank} a/b {p} True" for rank in (1, 2) for p in patterns]


def test_each_host_downloads_for_itself(tmp_path):
    """A host's disk is its own: three hosts of one rank each download three times."""
    printed, calls = run(tmp_path, hosts=3)
    assert printed == [str(tmp_path)] * 3
    assert sorted(call[0] for call in calls if "['*']" in call) == ["0", "1", "2"]
    assert all(call.endswith("False") for call in calls)


def test_a_failed_download_ends_all_ranks_with_its_error(tmp_path):
    """B60: the rank that tried has the error, the others the same words; nobody tries again."""
    (tmp_path / "fails").touch()
    printed, calls = run(tmp_path)
    said = (
        "model 'a/b' is not a folder here, and modelscope does not give it (no such model); "
        "check the name and the connection, or give a folder"
    )
    assert printed == [f"HubError: {said}", *[f"PeerError: rank 0: {said}"] * 2]
    assert len(calls) == 1


def test_waiting_for_a_download_has_a_limit(tmp_path):
    """A rank that waited too long says for whom."""
    printed, _ = run(tmp_path, limit_s=0.5)
    assert re.match(r"PeerError: the download of a/b: rank 0.* did not come within 0.5 s; look", printed[1])


def cached(cache: Path, name: str, **files: str) -> Path:
    """A model in Hugging Face's cache, as its package lays it out."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    for file, text in files.items():
        path = snapshot / file.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_hugging_face_gives_what_its_cache_holds_without_a_network(tmp_path, monkeypatch):
    """The real package, offline: a model in its cache is found, another is one sentence."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = cached(tmp_path, "owner/model", model_index_json="{}", vae__config_json="{}")
    alone = World(0, 1, 0, CPU)
    assert local_folder("owner/model", alone, first=FIRST, then=rest) == snapshot
    message = (
        r"^model 'owner/none' is not a folder here, and huggingface does not give it \(.+\); check the name"
    )
    with pytest.raises(HubError, match=message):
        local_folder("owner/none", alone, first=FIRST, then=rest)


def test_a_hub_that_is_not_there_is_refused():
    """By name if it is unknown, by its package if that is not installed."""
    check_hub("huggingface")
    with pytest.raises(ValueError, match=r"^hub 'gitlab' is not known; use huggingface or modelscope$"):
        check_hub("gitlab")


def test_a_hub_without_its_package_names_it(monkeypatch):
    """What to install is in the sentence."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    message = (
        r"^hub 'modelscope' needs the package modelscope, which is not installed; pip install modelscope, or"
    )
    with pytest.raises(ValueError, match=message):
        check_hub("modelscope")


def test_the_environment_names_the_hub():
    """USP_HUB, or Hugging Face."""
    assert read_hub({}) == "huggingface"
    assert read_hub({"USP_HUB": "modelscope"}) == "modelscope"
