"""The default tier, ``namespaces``: Linux namespaces, set up by Python alone."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from primerl.sandbox.guest.isolation import shared_root
from primerl.sandbox.results import Isolation, Root
from primerl.sandbox.tiers.images.cache import Grow, ImageCache
from primerl.sandbox.tiers.interface import Options
from primerl.sandbox.tiers.local.proxy import Proxy
from primerl.sandbox.tiers.local.roots import ImageRoot, Roots
from primerl.sandbox.tiers.local.slots import Slot
from primerl.sandbox.tiers.local.tier import LocalTier


class Namespaces(LocalTier):
    """The tier ``namespaces``, which isolates each sandbox by several layers.

    They are user, pid, mount, network, ipc, uts and cgroup namespaces, a seccomp filter, and
    Landlock if the kernel has it.
    """

    name = "namespaces"
    way = "namespaces"
    hides = tuple(shared_root.PLACES)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._proxy = Proxy(options.allow_network) if options.allow_network else None
        self.network = self._proxy is not None
        self._roots: Roots | None = None
        self._images: ImageCache[ImageRoot] = ImageCache(
            self._unpack,
            lambda image: self._prepared().remove(image.root.name),
            limit_bytes=options.image_bytes,
            timeout_s=options.image_timeout_s,
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that tell programs the proxy's address; empty without a proxy."""
        return {} if self._proxy is None else self._proxy.environment

    async def make(self, settings: Mapping[str, Any]) -> Slot:
        """Create a sandbox, on the root of its image if it has one; serve its connections."""
        image = settings.get("image")
        if image is None:
            return await self._make(settings)
        held = await self._images.take(image)
        try:
            slot = await self._make({**settings, **held.value.root.settings})
        except BaseException:
            self._images.release(held)
            if not self._prepared().has(held.value.root.name):
                self._images.forget(held)
            raise
        slot.environment = held.value.environment
        slot.on_end.append(functools.partial(self._images.release, held))
        return slot

    async def _make(self, settings: Mapping[str, Any]) -> Slot:
        slot = await super().make(settings)
        if self._proxy is not None and slot.listener is not None:
            slot.on_end.append(functools.partial(self._proxy.forget, slot.listener))
            self._proxy.serve(slot.listener)
        return slot

    async def prepare_root(self, layers: Sequence[str]) -> Root:
        """Copy the layers into a root filesystem that sessions share."""
        return await self._prepared().prepare([*layers], make=super().make)

    async def fetch(self, image: str) -> None:
        """Unpack an image into a root filesystem, unless this host has it."""
        await self._images.fetch(image)

    def stats(self) -> dict[str, Any]:
        """Return the images that are unpacked here."""
        return self._images.stats()

    def _prepared(self) -> Roots:
        if self._roots is None:
            self._roots = Roots(self.launcher.folder / "roots", user=self.launcher.user)
        return self._roots

    async def _unpack(self, image: str, grow: Grow) -> ImageRoot:
        return await self._prepared().unpack(image, make=super().make, grow=grow)

    async def close(self) -> None:
        """Close the proxy, then the zygote with all sandboxes."""
        await self._images.close()
        if self._proxy is not None:
            await self._proxy.close()
        await super().close()

    def isolation(self) -> Isolation:
        """Describe the isolation by namespaces in force."""
        layers = ["namespaces (user, pid, mount, net, ipc, uts, cgroup)", "read-only root"]
        layers += ["seccomp", "no capabilities", "rlimits"]
        reachable = "no network"
        if self._proxy is not None:
            reachable = f"no network except {', '.join(self._proxy.allowed)}, through a proxy"
        return Isolation(
            tier=self.name,
            shared_kernel=True,
            memory=self.memory(),
            user=self.user(),
            layers=(*layers, *(["landlock"] if self.launcher.landlock else [])),
            stops=(
                "reading and writing the host's files",
                f"network: {reachable}",
                "seeing, signaling and tracing the host's processes and other sandboxes",
                "system calls outside a list of about 240",
                "more processes, files, memory, time and output than allowed",
                "outliving its owner",
            ),
            does_not_stop=(
                "a bug in the kernel that the allowed system calls reach: the kernel is shared",
                "processor and timing side channels",
                "high CPU load by all sandboxes together, within their limits",
                "reading the listed read-only folders",
            ),
        )
