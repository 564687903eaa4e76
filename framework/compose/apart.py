"""Hydra's process-wide state, used for a while and put back."""

import contextlib
from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase


@contextlib.contextmanager
def apart() -> Iterator[Any]:
    """A copy of Hydra's config store to write in. Works inside another Hydra application and leaves no trace."""
    store, app, version = ConfigStore.instance(), GlobalHydra.instance(), VersionBase.instance()
    before = store.repo, app.hydra, version.version_base, HydraConfig.instance().cfg
    store.repo, app.hydra = dict(store.repo), None
    try:
        yield store
    finally:
        app = GlobalHydra.instance()
        store.repo, app.hydra, version.version_base, HydraConfig.instance().cfg = before
