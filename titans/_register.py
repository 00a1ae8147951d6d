"""Makes the Auto classes of transformers know our models, without loading transformers before somebody else does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"  # AutoConfig's module; the other Auto classes load it first
OURS = "titans.models.configuration"  # registers the config, and the models once a config is made


def register_when_transformers_is_loaded() -> None:
    """Registers at once if AutoConfig is there already, and otherwise right after it has been loaded."""
    if AUTO in sys.modules:
        import_module(OURS)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.asking = threading.local()  # .now: this thread asks the other finders, which comes back here

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO or getattr(self.asking, "now", False):
            return None
        self.asking.now = True
        try:
            spec = find_spec(fullname)
        finally:
            self.asking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:  # once it has been loaded, and not when somebody only looked for it
            sys.meta_path.remove(self.finder)
        import_module(OURS)
