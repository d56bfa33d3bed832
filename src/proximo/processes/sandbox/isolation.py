"""The isolation of a program: a separate root, namespaces, Landlock, limits, a system-call filter.

Some parts are set up once for a server, which never runs foreign code, and inherited; the others for each program.
"""

import ctypes
import os
import resource
import stat
import struct
import sys
from dataclasses import dataclass

from proximo.processes.sandbox import kernel
from proximo.processes.sandbox.filtering import instructions
from proximo.processes.sandbox.limits import DEVICES, NOBODY, Limits

SCRATCH = "/scratch"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_COVERED = ("/sys", "/mnt", "/srv", "/tmp")
"""Candidates for the mount point of the new root; the first that is a folder is used."""
_MEGABYTE = 2**20
_INODES = 1024
_FILES = 64
_STACK = 64 * _MEGABYTE


@dataclass(frozen=True)
class Cage:
    """The isolation that a server could set up, used for each of its programs."""

    folders: tuple[str, ...]
    """Folders that a program may read."""
    own_root: bool
    """True if the program has a separate root, where nothing else is visible."""
    namespaces: bool
    landlock: int
    """Landlock version; 0 if the kernel has none."""
    process_files: int | None
    """Descriptor of /proc, which the separate root lacks; not inherited by programs. None: under bubblewrap."""

    @property
    def scratch(self) -> bool:
        return self.own_root and self.namespaces


def readable_folders() -> tuple[str, ...]:
    """The interpreter's library and the system libraries it is linked with, without nested folders."""
    interpreter = {os.path.realpath(path) for path in sys.path if os.path.isdir(path)}
    shared = {os.path.realpath(os.path.join(sys.base_prefix, name)) for name in ("lib", "lib64")}
    wanted = sorted(path for path in {*interpreter, *shared, *_LIBRARIES} if os.path.exists(path))
    return tuple(path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted))


# Once for a server


def build_root(folders: tuple[str, ...]) -> None:
    """Move to an empty root with only these folders, read-only."""
    namespaces = kernel.NEW_NS
    user, group = os.getuid(), os.getgid()
    if user != 0:
        namespaces |= kernel.NEW_USER
    kernel.unshare(namespaces)
    if user != 0:
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        _map_ids(processes, user, group)
        os.close(processes)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    root = next(path for path in _COVERED if os.path.isdir(path))
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in (*folders, *DEVICES):
        _show(path, root)
    os.mkdir(root + SCRATCH)
    os.chdir(root)
    kernel.pivot_here()
    kernel.make_read_only("/", devices=True)


def _show(path: str, root: str) -> None:
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(target, devices=path in DEVICES)


def landlock_version() -> int:
    try:
        return kernel.call("landlock", kernel.LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


# For each program, by its keeper


def become_nobody() -> None:
    """Change from root to the user nobody."""
    if os.getuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        why = f"root cannot become user {NOBODY} ({error.strerror}), whom a rootless container may not have: "
        raise OSError(
            error.errno, why + "give it a range of users (subuid, subgid), or start as another user"
        ) from None
    kernel.set_dumpable(True)  # otherwise /proc does not permit mapping its own user


def enter_namespaces(process_files: int) -> None:
    """Enter new user, PID (for the next child), network, IPC, UTS and mount namespaces."""
    user, group = os.getuid(), os.getgid()
    flags = kernel.NEW_USER | kernel.NEW_PID | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS | kernel.NEW_NS
    kernel.unshare(flags)
    _map_ids(process_files, user, group)


def _map_ids(process_files: int, user: int, group: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=process_files)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def mount_scratch(limits: Limits) -> None:
    """Mount the scratch folder, which disappears with the last process of its namespace."""
    options = f"size={limits.scratch_mb}m,nr_inodes={_INODES},mode=700"
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


# For each program, in its own process


def lock_in(cage: Cage, limits: Limits) -> None:
    """Apply all remaining restrictions, irrevocably. The filter comes last, since it forbids the other calls."""
    os.chdir(SCRATCH if cage.scratch else "/")
    os.umask(0o077)
    set_limits(limits, counts_threads=cage.namespaces)
    kernel.no_new_privileges()
    if cage.landlock:
        lock_files(cage)
    kernel.drop_capabilities()
    kernel.set_dumpable(False)
    kernel.die_with_parent()
    kernel.set_filter(instructions(os.getpid()))


def set_limits(limits: Limits, *, counts_threads: bool) -> None:
    memory = limits.memory_mb * _MEGABYTE
    # Without a user namespace the kernel would count other processes of the user; the filter forbids processes anyway.
    threads = limits.threads if counts_threads else resource.getrlimit(resource.RLIMIT_NPROC)[1]
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_STACK, min(_STACK, memory)),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_FSIZE, limits.scratch_mb * _MEGABYTE),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_NPROC, threads),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        limit = limit if (hard := resource.getrlimit(what)[1]) == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_SCRATCH_RIGHTS = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _TRUNCATE


def lock_files(cage: Cage) -> None:
    """Landlock: these folders read-only; the scratch folder; no TCP, no outgoing signals, no abstract sockets."""
    version = cage.landlock
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    ruleset = _Ruleset(handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = kernel.call("landlock_create_ruleset", kernel.LANDLOCK_CREATE, ruleset, size, 0)
    for path in cage.folders:
        _permit(rules, path, _READ_FILE | _READ_DIR)
    for path in DEVICES:
        _permit(rules, path, _READ_FILE | _WRITE_FILE)
    if cage.scratch:
        _permit(rules, SCRATCH, _SCRATCH_RIGHTS & handled)
    kernel.call("landlock_restrict_self", kernel.LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _permit(rules: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            rights &= _READ_FILE | _WRITE_FILE | _TRUNCATE
        kernel.call("landlock_add_rule", kernel.LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, file), 0)
    finally:
        os.close(file)
