"""Bytes on the wire between processes of one machine: the counters of a loopback interface that
no other process uses.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from pathlib import Path


def own_loopback() -> bool:
    """Give this process and its children a network of their own, with nothing but a loopback
    interface; False where the kernel refuses.
    """
    # from Linux's sched.h
    unshare, new_network, new_user = ctypes.CDLL(None).unshare, 0x40000000, 0x10000000
    if unshare(new_network) != 0 and unshare(new_network | new_user) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP
    return True


def sent_bytes() -> int:
    """Bytes that have gone through the loopback interface so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise AssertionError("no loopback interface")
