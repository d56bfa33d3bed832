"""The system calls a program may make: those that a Python process with several threads needs, and no others.

An allowlist, so that new system calls of future kernels are refused. It permits no new process, no other program, no
socket except a pair, no signal to other processes, no mount, no namespace.
"""

import errno
import struct
from functools import cache

from proximo.processes.sandbox.kernel import MACHINE

# Each as name:x86_64:aarch64; - if the machine has none.
_ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 access:21:-
faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78 lseek:8:62 pread64:17:67 pwrite64:18:68 readv:19:65
writev:20:66 preadv:295:69 pwritev:296:70 getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 openat:257:56
dup:32:23 dup2:33:- dup3:292:24 ftruncate:77:46 fsync:74:82 fdatasync:75:83 flock:73:32 rename:82:- renameat:264:38
renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 umask:95:166 statfs:137:43
fstatfs:138:44 fadvise64:221:223 sendfile:40:71 copy_file_range:326:285 close_range:436:436
pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20
epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 eventfd2:290:19 sendmsg:46:211 recvmsg:47:212 sendto:44:206
recvfrom:45:207 shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205
mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 brk:12:214 madvise:28:233 msync:26:227
futex:202:98 set_robust_list:273:99 rseq:334:293 set_tid_address:218:96 gettid:186:178 sched_yield:24:124
sched_getaffinity:204:123 getcpu:309:168 membarrier:324:283 exit:60:93 exit_group:231:94
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 sigaltstack:131:132 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 rt_sigpending:127:136 pause:34:- alarm:37:- setitimer:38:103 getitimer:36:102
restart_syscall:219:128 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101
gettimeofday:96:169 time:201:- times:100:153
getpid:39:172 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
getresgid:120:150 getgroups:115:158 getpgrp:111:- getpgid:121:155 getsid:124:156 uname:63:160 sysinfo:99:179
getrusage:98:165 getrlimit:97:163 getpriority:140:141 getrandom:318:278
"""

# These depend on an argument: its index, and the permitted values.
_DEPENDING = (
    "clone:56:220 kill:62:129 tgkill:234:131 prctl:157:167 prlimit64:302:261 ioctl:16:29 socketpair:53:199 fcntl:72:25"
)
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
_AF_UNIX, _SOCK_STREAM, _SOCK_KIND = 1, 1, 0xF
# Is it a terminal, its width, bytes to read, blocking, close-on-exec set and cleared.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)  # copies, flags and locks; not the signal owner of a file
_NAMES = (15, 16)  # of a thread
_NEW_CALLS = 424
"""Numbers from here on are the same on all machines and newer than 2019. They are answered as unknown, so that libc
uses the older call (clone instead of clone3, whose flags a filter cannot read)."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _numbers(table: str, machine: str = MACHINE) -> dict[str, int]:
    """System-call numbers of this machine by name; calls it does not have are left out."""
    column = list(_AUDIT).index(machine)
    words = [word.split(":") for word in table.split()]
    return {word[0]: int(word[1 + column]) for word in words if word[1 + column] != "-"}


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """BPF instruction; `yes` and `no` are the numbers of instructions to skip."""
    return struct.pack("=HBBI", code, yes, no, value)


def _if_argument(
    number: int, argument: int, values: tuple[int, ...], mask: int = 0xFFFFFFFF, *, first: int | None = None
) -> bytes:
    """Allow a call if the masked lower half of an argument is one of these, and its first argument is `first`, if
    given; else refuse it."""
    tests = b"".join(_step(_EQUAL, value, 0, 1) + _step(_RETURN, _ALLOW) for value in values)
    body = _step(_LOAD, _ARGUMENTS + 8 * argument) + _step(_AND, mask) + tests
    if first is not None:
        refusal = _step(_RETURN, _REFUSE | errno.EPERM)
        body = _step(_LOAD, _ARGUMENTS) + _step(_EQUAL, first, 1, 0) + refusal + body
    body += _step(_RETURN, _REFUSE | errno.EPERM)
    return _step(_EQUAL, number, 0, len(body) // 8) + body


@cache
def instructions(pid: int) -> bytes:
    """The filter for the process with this id, which may signal only itself."""
    depending = _numbers(_DEPENDING)
    code = _step(_LOAD, _ARCHITECTURE) + _step(_EQUAL, _AUDIT[MACHINE], 1, 0) + _step(_RETURN, _KILL)
    code += _step(_LOAD, _NUMBER)
    for number in _numbers(_ALLOWED).values():
        code += _step(_EQUAL, number, 0, 1) + _step(_RETURN, _ALLOW)
    code += _if_argument(depending["clone"], 0, (_CLONE_THREAD,), _CLONE_THREAD | _CLONE_NEW)
    code += _if_argument(depending["kill"], 0, (pid,))
    code += _if_argument(depending["tgkill"], 0, (pid,))
    code += _if_argument(depending["prctl"], 0, _NAMES)
    code += _if_argument(depending["prlimit64"], 0, (0, pid))
    code += _if_argument(depending["ioctl"], 1, _IOCTLS)
    code += _if_argument(depending["fcntl"], 1, _FCNTLS)
    code += _if_argument(depending["socketpair"], 1, (_SOCK_STREAM,), _SOCK_KIND, first=_AF_UNIX)
    code += _step(_AT_LEAST, _NEW_CALLS, 0, 1) + _step(_RETURN, _REFUSE | errno.ENOSYS)
    return code + _step(_RETURN, _REFUSE | errno.EPERM)
