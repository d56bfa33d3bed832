"""What a hostile or broken program may try, as data: each with the ways it may end, and whether it is safe to run bare.

Every payload prints a fresh nonce first, else it did not run; a marker, made at run time, says that it got out. Those
that are safe are run without a sandbox too, where they must get out: a payload that fails by itself proves nothing.
"""

from dataclasses import dataclass

PRELUDE = """
import ctypes, os, resource, signal, socket, struct, subprocess, sys, threading, time
print(NONCE, flush=True)
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ARM = os.uname().machine == "aarch64"

def out(what=""):
    print("".join(("esc", "aped")), what, flush=True)

def attempt(action, *arguments):
    try:
        found = action(*arguments)
    except (OSError, MemoryError, subprocess.SubprocessError) as error:
        print("held", type(error).__name__, error)
    else:
        out(found)

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def system(x86, arm, *arguments):
    return checked(libc.syscall(ctypes.c_long(arm if ARM else x86), *map(ctypes.c_long, arguments)))

def child(number):
    if number == 0:
        os._exit(0)
    os.waitpid(number, 0)
    return number
"""


@dataclass(frozen=True)
class Payload:
    name: str
    code: str
    ends: tuple[str, ...] = ("exit",)
    """How it may end, as ProgramResult.ended says it."""
    bare: bool = True
    """Safe without a sandbox, and gets out there."""


KILLED = ("time", "signal")

BOMBS = (
    Payload("loop", "while True: pass", KILLED, bare=False),
    Payload("sleep", "time.sleep(3600)", ("time",), bare=False),
    Payload(
        "ignored SIGTERM",
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):\n"
        "    signal.signal(number, signal.SIG_IGN)\nwhile True: time.sleep(0.01)",
        ("time",),
        bare=False,
    ),
    Payload("fork bomb", "for _ in range(50): attempt(lambda: child(os.fork()))", bare=False),
    Payload(
        "thread bomb",
        "begun = 0\ntry:\n"
        "    for _ in range(2000):\n"
        "        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start(); begun += 1\n"
        "except RuntimeError: print('held')\nif begun > 100: out(begun)",
        bare=False,
    ),
    Payload("memory at once", "attempt(bytearray, 8 << 30)", bare=False),
    Payload("memory bit by bit", "held = []\nwhile True: held.append(bytearray(1 << 20))", bare=False),
    Payload("memory in a file", "attempt(os.memfd_create, 'more')"),
    Payload("shared memory", "attempt(system, 29, 194, 0, 1 << 20, 0o1600)", bare=False),
    Payload(
        "disk",
        "def fill():\n    with open('big', 'wb') as file:\n"
        "        for _ in range(200): file.write(bytes(1 << 20))\nattempt(fill)",
        bare=False,
    ),
    Payload(
        "many files on disk",
        "def fill():\n    for number in range(40):\n"
        "        with open(str(number), 'wb') as file: file.write(bytes(1 << 20))\nattempt(fill)",
        bare=False,
    ),
    Payload(
        "inodes",
        "def fill():\n    for number in range(5000): open(str(number), 'w').close()\nattempt(fill)",
        bare=False,
    ),
    Payload("stdout", "while True: print('x' * 65536)", ("output",), bare=False),
    Payload("stderr", "while True: print('x' * 65536, file=sys.stderr)", ("output",), bare=False),
    Payload("open files", "attempt(lambda: len([os.dup(1) for _ in range(5000)]))", bare=False),
    Payload("recursion", "sys.setrecursionlimit(10 ** 9)\ndef f(x): return f([x]) + 1\nf(0)", ("exit", *KILLED), False),
    Payload("segmentation fault", "ctypes.string_at(0)", ("signal",), bare=False),
    Payload("parser", "compile('(' * 100000 + ')' * 100000, 'p', 'exec')", ("exit", *KILLED), bare=False),
    Payload("big number", "x = 9 ** 9 ** 9", KILLED, bare=False),
    Payload("regular expression", "import re\nre.match('(a+)+$', 'a' * 50 + 'b')", KILLED, bare=False),
    Payload("early exit", "os._exit(0)", bare=False),
    Payload("bad UTF-8", "os.write(1, bytes(range(128, 256)))", bare=False),
    Payload("closed streams", "os.close(0); os.close(1); os.close(2)\nwhile True: pass", KILLED, bare=False),
    Payload(
        "a thread that stays",
        "def stay():\n    while True: time.sleep(0.01)\nthreading.Thread(target=stay).start()",
        ("time",),
        bare=False,
    ),
    Payload(
        "larger limits",
        "for what in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):\n"
        "    try: resource.setrlimit(what, (resource.RLIM_INFINITY,) * 2)\n"
        "    except ValueError: print('held')\n    else: out()",
        bare=False,
    ),
)

SECRETS = (
    Payload("environment", "if 'CANARY' in os.environ: out()"),
    Payload(
        "environment in memory",
        "first = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\nnumber = 0\n"
        "while first and first[number]:\n"
        "    if first[number].startswith(b'CANARY'): out()\n    number += 1",
    ),
    Payload(
        "environment of others",
        "def look():\n    for number in os.listdir('/proc'):\n        if number.isdecimal():\n"
        "            try: found = open(f'/proc/{number}/environ', 'rb').read()\n            except OSError: continue\n"
        "            if b'CANARY=' in found: return number\n    raise OSError\nattempt(look)",
    ),
    Payload("memory of another by /proc", "attempt(lambda: open(f'/proc/{VICTIM}/mem', 'rb'))"),
    Payload("its own /proc", "attempt(lambda: open('/proc/self/status').read(9))"),
    Payload("accounts", "attempt(lambda: open('/etc/passwd').read(4))"),
    Payload("the run: read", "attempt(lambda: open(RUN + '/weights').read())"),
    Payload("the run: list", "attempt(os.listdir, RUN)"),
    Payload("the run: look", "attempt(os.chdir, RUN)"),
    Payload("the run: append", "attempt(lambda: open(RUN + '/weights', 'a').write('x'))"),
    Payload("the run: overwrite", "attempt(lambda: open(RUN + '/weights', 'w').write('x'))"),
    Payload("the run: truncate", "attempt(os.truncate, RUN + '/weights', 0)"),
    Payload("the run: delete", "attempt(os.remove, RUN + '/weights')"),
    Payload("the run: rename", "attempt(os.rename, RUN + '/weights', RUN + '/other')"),
    Payload("the run: new file", "attempt(lambda: open(RUN + '/new', 'w').write('x'))"),
    Payload("the run: rights", "attempt(os.chmod, RUN + '/weights', 0)"),
    Payload("the run: times", "attempt(os.utime, RUN + '/weights', (0, 0))"),
    Payload("through a symbolic link", "attempt(lambda: os.symlink(RUN, 'l') or open('l/weights').read())"),
    Payload("through a hard link", "attempt(lambda: os.link(RUN + '/weights', 'l') or open('l').read())"),
    Payload("through ..", "attempt(lambda: open('../' * 20 + RUN + '/weights').read())"),
    Payload(
        "shared folders", "attempt(lambda: open('/dev/shm/left-behind', 'w') and os.remove('/dev/shm/left-behind'))"
    ),
    Payload("temporary folders", "attempt(lambda: open('/tmp/left-behind', 'w') and os.remove('/tmp/left-behind'))"),
    Payload("every open file", "for number in range(3, 1024): attempt(os.write, number, b'x')", bare=False),
)

NETWORK = (
    Payload("TCP connection", "attempt(lambda: socket.create_connection(('127.0.0.1', PORT), 2))"),
    Payload("TCP server", "attempt(lambda: socket.create_server(('127.0.0.1', 0)))"),
    Payload("UDP", "attempt(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT)))"),
    Payload("names", "attempt(socket.gethostbyname, 'localhost')"),
    Payload("raw packets", "attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))"),
    Payload("unix socket", "attempt(lambda: socket.socket(socket.AF_UNIX).connect(RUN + '/socket'))"),
    Payload("abstract socket", "attempt(lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT))"),
    Payload(
        "half a pair",
        "attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', RUN + '/mail'))",
    ),
)

PROCESSES = (
    Payload("kill", "attempt(os.kill, VICTIM, 9)"),
    Payload("kill everyone", "attempt(os.kill, -1, 9)", bare=False),
    Payload("kill its parent", "attempt(os.kill, os.getppid(), 9)", bare=False),
    Payload("kill by a file", "attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9))"),
    Payload(
        "signals from a pipe",
        "import fcntl\nread, write = os.pipe()\nattempt(fcntl.fcntl, read, fcntl.F_SETOWN, VICTIM)",
    ),
    Payload("ptrace", "attempt(lambda: checked(libc.ptrace(0x4206, VICTIM, 0, 0)))"),
    Payload("memory of another", "attempt(system, 310, 270, VICTIM, 0, 0, 0, 0, 0)"),
    Payload("limits of another", "attempt(resource.prlimit, VICTIM, resource.RLIMIT_NOFILE, (9, 9))", bare=False),
    Payload("priority of another", "attempt(os.setpriority, os.PRIO_PROCESS, VICTIM, 19)"),
    Payload("another program", "attempt(lambda: subprocess.run(['/bin/true'], check=True))"),
    Payload("a shell", "if os.system('true') == 0: out()"),
    Payload("becoming another program", "attempt(os.execv, '/bin/echo', ['echo', ''.join(('esc', 'aped'))])"),
    Payload("spawned", "attempt(lambda: child(os.posix_spawn('/bin/true', ['true'], {})))"),
    Payload(
        "daemon",
        "def daemon():\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(3600)\n        os._exit(0)\nattempt(daemon)",
        bare=False,
    ),
)

KERNEL = (
    Payload("nested user namespace", "attempt(lambda: checked(libc.unshare(0x10000000)))"),
    Payload("cloned user namespace", "attempt(lambda: child(system(56, 220, 0x10000011, 0, 0, 0, 0)))"),
    Payload("clone3", "attempt(system, 435, 435, 0, 0)", bare=False),
    Payload("mount", "attempt(lambda: checked(libc.mount(b'x', b'/scratch', b'tmpfs', 0, b'')))", bare=False),
    Payload("unmount", "attempt(lambda: checked(libc.umount2(b'/scratch', 2)))", bare=False),
    Payload("another root", "attempt(os.chroot, '.')", bare=False),
    Payload("becoming root", "attempt(os.setuid, 0); attempt(os.setgid, 0); attempt(os.setgroups, [0])", bare=False),
    Payload("a device", "attempt(os.mknod, 'disk', 0o60666, os.makedev(254, 0))", bare=False),
    Payload("keys", "attempt(system, 250, 219, 0, -3, 0)"),
    Payload("io_uring", "new = ctypes.create_string_buffer(256)\nattempt(system, 425, 425, 1, ctypes.addressof(new))"),
    Payload("user faults", "attempt(system, 323, 282, 1)"),
    Payload(
        "performance events",
        "event = ctypes.create_string_buffer(struct.pack('=IIQ', 1, 112, 0) + bytes(96))\n"
        "attempt(system, 241, 298, ctypes.addressof(event), 0, -1, -1, 0)",
        bare=False,
    ),
    Payload(
        "BPF", "made = ctypes.create_string_buffer(struct.pack('=IIII', 2, 4, 4, 1) + bytes(112))\n"
        "attempt(system, 321, 280, 0, ctypes.addressof(made), 128)",
    ),
    Payload("tracing itself", "attempt(lambda: checked(libc.prctl(4, 1, 0, 0, 0)))"),
    Payload("the clock", "attempt(time.clock_settime, time.CLOCK_REALTIME, time.time())", bare=False),
    Payload("the machine's name", "attempt(socket.sethostname, 'mine')", bare=False),
    Payload("a filter of its own", "attempt(system, 317, 277, 2, 0, 0)", bare=False),
    Payload("32-bit calls", "attempt(system, 0x40000000 + 39, 172 + 0x40000000)", bare=False),
)  # fmt: skip

PAYLOADS = (*BOMBS, *SECRETS, *NETWORK, *PROCESSES, *KERNEL)
