"""System calls that Python's library lacks. Linux only, x86_64 and aarch64."""

import ctypes
import os
import platform

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_DETACH = 2
_AT_RECURSIVE = 0x8000
_PDEATHSIG, _DUMPABLE, _SECCOMP, _NO_NEW_PRIVS = 1, 4, 22, 38
_KILL = 9

MACHINE = platform.machine()
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(MACHINE, (-1, -1))
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(what: str, number: int, *arguments: int | bytes | ctypes.Structure | None) -> int:
    """A system call by its number; `what` names it in an OSError."""
    return _checked(_libc.syscall(ctypes.c_long(number), *map(_given, arguments)), what)


def _given(argument: int | bytes | ctypes.Structure | None) -> object:
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*words), f"mount of {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def make_read_only(path: str, *, devices: bool = False) -> None:
    """Make a mount read-only with everything below it, and ignore set-user-id bits there."""
    flags = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    attributes = _MountAttributes(flags, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    call("mount_setattr", MOUNT_SETATTR, -100, path.encode(), _AT_RECURSIVE, attributes, size)


def pivot_here() -> None:
    """Make the current folder, a mount point, the root; the old root is unmounted."""
    call("pivot_root", _PIVOT_ROOT, b".", b".")
    _checked(_libc.umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/")


def _prctl(what: str, option: int, value: object) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), value, zero, zero, zero), what)


def die_with_parent() -> None:
    _prctl("PR_SET_PDEATHSIG", _PDEATHSIG, ctypes.c_ulong(_KILL))


def set_dumpable(dumpable: bool) -> None:
    """Set whether the owner of a process may inspect it and owns its files under /proc."""
    _prctl("PR_SET_DUMPABLE", _DUMPABLE, ctypes.c_ulong(dumpable))


def no_new_privileges() -> None:
    _prctl("PR_SET_NO_NEW_PRIVS", _NO_NEW_PRIVS, ctypes.c_ulong(1))


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _checked(_libc.syscall(ctypes.c_long(_CAPSET), header, (ctypes.c_uint32 * 6)()), "capset")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def set_filter(instructions: bytes) -> None:
    """Install a seccomp filter, irrevocably: classic BPF, eight bytes per instruction."""
    program = _Program(len(instructions) // 8, instructions)
    _checked(
        _libc.prctl(
            ctypes.c_int(_SECCOMP), ctypes.c_ulong(2), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0)
        ),
        "PR_SET_SECCOMP",
    )
