"""Which addresses the driver gives to cudaMalloc. Up to PyTorch 2.11 they decide between equally large free
blocks, and so how much is reserved.

As recorded on an H100 under Linux (driver 580; tests/recordings/traces): the driver maps regions of whole 32
MiB, each below the one before, and a later request that fits into what is left of one gets the lowest such
place. The first few regions lie in holes between the process's libraries, which differ from run to run; they
are not modelled.
"""

from harness.units import round_up

kRoundLarge = 2 * 2**20
"""Segments of 10 MiB and more are a multiple of it. It is also the granularity of physical memory."""
kRegion = 32 * 2**20
"""Regions are a multiple of it, in bytes."""
kTop = 0x7F8000000000
"""The end of the first region."""


class DriverAddresses:
    """The addresses of one process on one device."""

    def __init__(self) -> None:
        self._lowest = kTop
        self._left: list[tuple[int, int]] = []
        """What is left of regions, as (first address, bytes), from the lowest on."""

    def take(self, size_bytes: int) -> int:
        """The address of a new range of so many bytes."""
        pages = round_up(size_bytes, kRoundLarge)
        for index, (lowest, room) in enumerate(self._left):
            if room >= pages:
                address = lowest
                del self._left[index]
                break
        else:
            room = round_up(pages, kRegion)
            self._lowest = address = self._lowest - room
        if room > pages:
            self.give_back(address + pages, room - pages)
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """A range is free again, whole."""
        self._left.append((address, round_up(size_bytes, kRoundLarge)))
        self._left.sort()
