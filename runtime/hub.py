"""A model's files from a hub: one rank per host downloads, the others wait on the store.

Nothing else in the project touches the network.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.log import get_logger
from runtime.world import PeerError, World, gather_text

# The package that serves each hub; both call it snapshot_download(name, allow_patterns=, ignore_patterns=,
# local_files_only=) and return the folder.
HUBS = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}
DOWNLOAD_LIMIT_S = 6 * 3600.0

logger = get_logger(__name__)


class HubError(RuntimeError):
    """A hub could not give a model; the message is a sentence."""


class Patterns(NamedTuple):
    """Which files of a model are wanted, as the hubs' globs."""

    allow: Sequence[str]
    ignore: Sequence[str] = ()


def check_hub(hub: str) -> None:
    """Raise ValueError unless `hub` is known and its package is installed."""
    if hub not in HUBS:
        raise ValueError(f"hub {hub!r} is not known; use {' or '.join(HUBS)}")
    package = HUBS[hub]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"hub {hub!r} needs the package {package}, which is not installed; "
            f"pip install {package}, or use another hub"
        )


def local_folder(
    name: str,
    world: World,
    *,
    first: Patterns,
    then: Callable[[Path], Patterns],
    hub: str = "huggingface",
    limit_s: float = DOWNLOAD_LIMIT_S,
) -> Path:
    """The folder on this host with the files of the model that is called `name` ("owner/name") on `hub`.

    Two rounds: the small files `first` names, then what `then` makes of that folder. Local rank 0 of each
    host downloads; the others wait on the store, at most `limit_s` seconds and with no collective open, and
    then look the folder up without the network. Every rank must call it, alike.
    Raises ValueError for a hub that is not there; HubError where the download failed, and PeerError with that
    error on every other rank.
    """
    check_hub(hub)
    fetches = world.local_rank == 0
    folder, error = None, None
    if fetches:
        logger.info("looking for %s on %s", name, hub)
        folder, error = _attempt(name, hub, first, then, offline=False)
    if world.store is not None:
        key = world.next_key(f"hub/{name}")
        said = gather_text(
            world, key, "" if error is None else str(error), f"the download of {name}", limit_s
        )
        failed = [rank for rank, text in enumerate(said) if text]
        if failed and error is None:
            raise PeerError(f"rank {failed[0]}: {said[failed[0]]}")
    if not fetches:
        folder, error = _attempt(name, hub, first, then, offline=True)
    if error is not None:
        raise error
    assert folder is not None, "there is a folder or an error"
    return folder


def _attempt(
    name: str, hub: str, first: Patterns, then: Callable[[Path], Patterns], *, offline: bool
) -> tuple[Path | None, HubError | None]:
    """The folder, or the error that the other ranks shall hear of before it is raised."""
    try:
        return _fetch(name, hub, then(_fetch(name, hub, first, offline=offline)), offline=offline), None
    except HubError as error:
        return None, error


def _fetch(name: str, hub: str, wanted: Patterns, *, offline: bool) -> Path:
    download = importlib.import_module(HUBS[hub]).snapshot_download
    patterns = {"allow_patterns": list(wanted.allow), "ignore_patterns": list(wanted.ignore)}
    try:
        return Path(download(name, **patterns, local_files_only=offline))
    except Exception as error:  # each hub has its own errors, of no common kind
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HubError(
            f"model {name!r} is not a folder here, and {hub} does not give it ({reason}); "
            f"check the name and the connection, or give a folder"
        ) from error
