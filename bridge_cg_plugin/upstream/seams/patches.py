"""Patches of upstream attributes: checked before, applied on import, undone without a trace."""

import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from .contract import described
from .seam import Found, Kind, Seam, drift
from .source_reader import NoSourceError, SourceReader

_ABSENT = object()

State = Literal["waiting", "active", "native", "broken", "off"]


class DriftError(RuntimeError):
    """Upstream does not look as a seam expects."""


def bridge_release() -> str:
    """Return the version of the megatron-bridge that this process uses, "" if there is none."""
    return _release("megatron-bridge", "megatron.bridge.package_info")


def core_release() -> str:
    """Return the version of the megatron-core that this process uses, "" if there is none."""
    return _release("megatron-core", "megatron.core.package_info")


def _release(package: str, module: str) -> str:
    version = getattr(sys.modules.get(module), "__version__", None)
    # In a git checkout it goes on with that checkout's commit.
    return version.partition("+")[0] if isinstance(version, str) else _installed_release(package)


@functools.cache
def _installed_release(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(slots=True)
class _Installed:
    """One replaced attribute.

    Attributes:
        owner: Module or class.
        name: Of the attribute.
        raw: What its `__dict__` held before.
        made: What it holds now.
        on: Whether the replacement does its work or passes calls through.
    """

    owner: Any
    name: str
    raw: Any
    made: Any = None
    on: bool = True

    def current(self) -> Any:
        """Return what the owner holds now."""
        return vars(self.owner).get(self.name, _ABSENT)

    def restore(self) -> None:
        """Put back what was there."""
        if self.raw is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)


@dataclass(slots=True)
class AtSeam:
    """What the plugin does at one seam while it is active.

    Attributes:
        seam: The place and what is expected there.
        state: "off" until upstream's module is imported, then what became of it.
        reason: Why, where that is not obvious.
    """

    seam: Seam
    state: State = field(default="off", init=False)
    reason: str = field(default="", init=False)
    # Newest last. What somebody else may still hold, and put back one day, is kept.
    _installed: list[_Installed] = field(default_factory=list, init=False, repr=False)

    @property
    def name(self) -> str:
        """The seam's name."""
        return self.seam.name

    @property
    def module(self) -> str:
        """The seam's module."""
        return self.seam.module

    def look(self) -> None:
        """Bring `state` and `reason` up to date with what others did since."""


@dataclass(slots=True)
class Patch(AtSeam):
    """A seam whose target is replaced while the plugin is active.

    Attributes:
        make: Builds the new value from the old one.
        extra: Changes what belongs with the target, given the target's owner, and returns what undoes the changes.
    """

    make: Callable[[Any], Any]
    extra: Callable[[Any], Callable[[], None]] | None = None
    _extras: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    @property
    def target(self) -> str:
        """The seam's target."""
        return self.seam.target

    def apply(self, module: ModuleType) -> None:
        """Replace the attribute, once however often it is called. A mismatch is noted in `state`, not raised.

        Where something took the plugin's place since, it is applied on what is there now.
        """
        try:
            owner = _reached(module, self.target.rpartition(".")[0])
            why_not = "" if self._resumes(owner) else self._replace(owner)
        except DriftError as error:
            self.state, self.reason = "broken", str(error)
            return
        self.state, self.reason = "native" if why_not else "active", why_not
        if not why_not and self.extra is not None:
            self._extras.close()
            self._extras.callback(self.extra(owner))

    def _replace(self, owner: Any) -> str:
        """Replace the attribute; returns why there is nothing to replace in this release, empty where it did.

        Raises:
            DriftError: What is there is not as expected.
        """
        name = self.target.rpartition(".")[2]
        old = getattr(owner, name, _ABSENT) if _defines(owner, name) else _ABSENT
        if old is _ABSENT and not self.seam.expected_in(bridge_release()):
            return f"came with megatron-bridge {self.seam.since}"
        differences = drift(self.seam, None if old is _ABSENT else _describe(old))
        if differences:
            raise DriftError("; ".join(differences))
        installed = _Installed(owner, name, vars(owner).get(name, _ABSENT))
        installed.made = _switched(installed, old, self.make(old))
        setattr(owner, name, installed.made)
        self._installed.append(installed)
        return ""

    def revert(self) -> None:
        """Put the attribute back as it was, absent included.

        Where somebody wrapped the replacement, their wrapper stays and the replacement passes calls through; a later
        `revert` puts the attribute back once they are gone.
        """
        self.state, self.reason = "off", ""
        self._extras.close()
        for installed in reversed(self._installed[:]):
            installed.on = False
            current = installed.current()
            if current is installed.made:
                installed.restore()
                self._installed.remove(installed)
            elif _contains(current, installed.made):
                self.reason = f"{_label(current)} wraps it; calls pass through"

    def look(self) -> None:
        """Bring `state` and `reason` up to date with what others did to the attribute since."""
        installed = next((i for i in self._installed if i.on), None)
        if installed is None:
            return
        current = installed.current()
        if _contains(current, installed.made):
            self.state, self.reason = "active", "" if current is installed.made else f"{_label(current)} wraps it"
            return
        self.state = "broken"
        self.reason = f"{_label(current)} replaced {self.seam.place}; call bridge_cg_plugin.activate() after it"

    def _resumes(self, owner: Any) -> bool:
        """Whether an earlier replacement is still in place; it is switched on, all others are switched off."""
        for installed in self._installed:
            installed.on = False
        found = (i for i in reversed(self._installed) if i.owner is owner and _contains(i.current(), i.made))
        resumed = next(found, None)
        if resumed is not None:
            resumed.on = True
        return resumed is not None


def _defines(owner: Any, attribute: str) -> bool:
    """Whether an owner has an attribute of its own; a class answers with those of its metaclass, too."""
    if owner is _ABSENT:
        return False
    return not inspect.isclass(owner) or any(attribute in vars(base) for base in owner.__mro__)


def _describe(value: Any) -> Found:
    """Return what a live object is."""
    attributes = frozenset(dir(value)) if inspect.isclass(value) else None
    if not callable(value):
        return Found("value")
    kind: Kind = "class" if inspect.isclass(value) else "function"
    try:
        signature = inspect.signature(value.__init__ if inspect.isclass(value) else value)
    except (ValueError, TypeError):
        return Found(kind, None, attributes)
    takes_more = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())
    return Found(kind, tuple(signature.parameters), attributes, takes_more=takes_more)


def _switched(installed: _Installed, old: Any, made: Any) -> Any:
    """Return the replacement of a function, with a switch that sends calls to the old one."""
    if not (callable(old) and inspect.isfunction(made)):
        return made

    @functools.wraps(old)
    def through(*args: Any, **kwargs: Any) -> Any:
        return (made if installed.on else old)(*args, **kwargs)

    if "__signature__" in vars(made):  # it takes other parameters than the old one
        vars(through)["__signature__"] = vars(made)["__signature__"]
    return through


def _contains(value: Any, inner: Any) -> bool:
    """Whether a value is `inner` or wraps it, as far as `__wrapped__` shows."""
    for _ in range(100):
        if value is inner:
            return True
        value = getattr(value, "__wrapped__", _ABSENT)
        if value is _ABSENT:
            return False
    return False


def _label(value: Any) -> str:
    """Name whoever made a value, for a message."""
    return "something that deleted it" if value is _ABSENT else described(value)


@dataclass(slots=True)
class Additions(AtSeam):
    """Attributes that a module or a class of upstream has while the plugin is active; nothing is replaced.

    Attributes:
        values: What is added by name, where the release is one that the seam names.
        always: What is added in every release.
    """

    values: Mapping[str, Any]
    always: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, module: ModuleType) -> None:
        """Add the attributes once. Names that upstream has itself stay upstream's and are noted in `reason`."""
        owner = _reached(module, self.seam.target)
        if any(added.owner is owner for added in self._installed):
            return
        self.revert()
        if owner is _ABSENT or (self.seam.kind == "class") != inspect.isclass(owner):
            self.state, self.reason = "broken", f"{self.seam.place} is no {self.seam.kind}"
            return
        expected = self.seam.expected_in(bridge_release())
        wanted = {**(self.values if expected else {}), **self.always}
        taken = [name for name, value in wanted.items() if getattr(owner, name, value) is not value]
        self._installed = [_Installed(owner, name, _ABSENT, wanted[name]) for name in wanted if name not in taken]
        for added in self._installed:
            setattr(owner, added.name, added.made)
        self.state = "active" if self._installed else "native"
        self.reason = f"upstream has its own {', '.join(taken)}" if taken else ""
        if not expected:
            self.reason = f"what derives from megatron-bridge {self.seam.since} is left out"

    def revert(self) -> None:
        """Remove what was added; what somebody put in its place since stays."""
        for added in self._installed:
            if added.current() is added.made:
                added.restore()
        self._installed.clear()
        self.state, self.reason = "off", ""


def _reached(module: Any, path: str) -> Any:
    """Return what a dotted path leads to from a module; `_ABSENT` where it leads nowhere."""
    for part in filter(None, path.split(".")):
        module = getattr(module, part, _ABSENT)
    return module


# (name, positional arguments, keyword arguments) -> the argument, None where the caller passes none.
FindArgument = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


def arguments_of(seam: Seam, function: Callable[..., Any]) -> FindArgument:
    """Return a lookup of a call's arguments by upstream's names for them, however the caller passes them.

    The signature of a wrapper that takes any arguments does not show their positions. It is called as upstream's own
    function is, whose source has them.

    Args:
        seam: Names the arguments.
        function: What is called: upstream's function, or what somebody put in its place.

    Raises:
        DriftError: The place of one of them is not known.
    """
    named = inspect.signature(function).parameters.values()
    by_place = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name: sys.maxsize for p in named if p.kind is p.KEYWORD_ONLY}
    places = {name: place for place, name in enumerate(by_place)} | by_name
    if not places.keys() >= set(seam.parameters):
        places = _upstreams_places(seam) | places
    unknown = [name for name in seam.parameters if name not in places]
    if unknown:
        raise DriftError(f"{seam.place} was replaced by a function that does not say where {', '.join(unknown)} stands")

    def find(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[name] if name in kwargs else args[places[name]] if places[name] < len(args) else None

    return find


@functools.cache
def _upstreams_places(seam: Seam) -> dict[str, int]:
    """Return the places of parameters of upstream's own function, read from its source; none where there is none."""
    try:
        found = SourceReader().find(seam)
    except NoSourceError:
        return {}
    return {} if found is None else {name: place for place, name in enumerate(found.parameters or ())}
